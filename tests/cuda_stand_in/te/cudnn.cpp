// cuDNN's graph interface, which builds nothing and agrees to every graph. What refuses a graph before it gets here
// is real: the rules in Transformer Engine's library and those of the cudnn-frontend that is compiled into it. With
// STAND_IN_CUDNN_REFUSES set it has no engine for any graph, which shows where its agreement decides.
#include <cudnn_backend.h>

#include <cstdlib>
#include <cstring>

namespace {

// Of the cuDNN that torch's package brings; Transformer Engine asks for it.
constexpr size_t VERSION = CUDNN_VERSION;

// Attributes that the frontend reads back and that are lists: a heuristic finds one engine configuration.
bool is_list_of_one(cudnnBackendAttributeName_t name) {
  return name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE;
}

struct Descriptor {
  cudnnBackendDescriptorType_t type;
};

size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
      return 8;
    case CUDNN_TYPE_FLOAT:
    case CUDNN_TYPE_INT32:
      return 4;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "an error of the stand-in";
}
void cudnnGetLastErrorString(char* text, size_t bytes) {
  if (bytes) *text = '\0';
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  static int the_handle;
  *handle = reinterpret_cast<cudnnHandle_t>(&the_handle);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
  *stream = nullptr;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  *descriptor = reinterpret_cast<cudnnBackendDescriptor_t>(new Descriptor{type});
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete reinterpret_cast<Descriptor*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                       cudnnBackendAttributeType_t, int64_t, const void*) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t asked,
                                       int64_t* found, void* values) {
  static const bool refuses = getenv("STAND_IN_CUDNN_REFUSES") != nullptr;
  if (refuses && name == CUDNN_ATTR_ENGINEHEUR_RESULTS) return CUDNN_STATUS_NOT_SUPPORTED;
  const bool is_scalar = asked == 1 && bytes_of(type) > 0;
  if (found) *found = is_list_of_one(name) || is_scalar ? 1 : 0;
  if (values && is_scalar) memset(values, 0, bytes_of(type));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t,
                                  cudnnBackendDescriptor_t) {
  return CUDNN_STATUS_SUCCESS;  // kernels.py logs the kernel and computes its values
}
}
