// Stands in for the one header of the CUDA compiler that the runtime's headers include: what its
// names mean to an ordinary host compiler.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __forceinline__ __inline__ __attribute__((always_inline))
#ifndef __dv
#define __dv(value)
#endif
#ifndef __specialization_static
#define __specialization_static
#endif
