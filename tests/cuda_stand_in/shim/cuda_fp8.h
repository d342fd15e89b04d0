// nccl.h includes it; nothing here computes with its types.
#pragma once
