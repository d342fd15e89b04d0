"""`torchrun --nproc-per-node 4 pretrain_gpt.py FLAGS` is `hydraulis train` from a checkout."""

import sys

from megatron.hydraulis.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
