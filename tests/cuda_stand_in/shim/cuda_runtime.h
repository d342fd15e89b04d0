// What nccl.h includes: the host's side of the runtime is all that it needs.
#pragma once
#include <cuda_runtime_api.h>
