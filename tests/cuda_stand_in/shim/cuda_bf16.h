// The type by its name: nothing here computes with it.
#pragma once
struct __nv_bfloat16;
