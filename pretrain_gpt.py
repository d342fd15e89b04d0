"""Train a GPT with Hydraulis: `torchrun --nproc-per-node 4 pretrain_gpt.py FLAGS`."""

from megatron.hydraulis.loop.entry import main

if __name__ == "__main__":
    main()
