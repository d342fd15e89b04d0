"""`torchrun --nproc-per-node 4 pretrain_gpt.py FLAGS` is `hydraulis train` from a checkout."""

from megatron.hydraulis.command_line import quiet_without_reader
from megatron.hydraulis.loop.entry import main

if __name__ == "__main__":
    with quiet_without_reader():
        main()
