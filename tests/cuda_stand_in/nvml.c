// The management library, as far as torch asks it: no NVLink, no fabric, no processes.
#include <stdlib.h>

#define NOT_SUPPORTED 3
#define CUDA_VERSION_OF_DRIVER 13000

int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  static int the_device;
  (void)id;
  *device = &the_device;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  const char* value = getenv("STAND_IN_DEVICES");
  *count = value ? (unsigned)atoi(value) : 8;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  (void)device, (void)processes;
  *count = 0;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION_OF_DRIVER;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }  // the caller's record stays empty: no fabric
