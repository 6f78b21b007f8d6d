/* A CUDA driver without a GPU: it answers all that Triton and fastmp ask of libcuda.so.1, and writes launches down.

   A function's handle is the address of what a launch needs to be written down: the number of its parameters, and the
   bytes of each. */

#include <cuda.h>
#include <stdint.h>
#include <string.h>

static unsigned char written[1 << 20];
static size_t used;
static int64_t *next_function;
static CUresult answer;
static int has_context = 1, contexts, context, captures, modules, more_parameters;
static _Thread_local CUstreamCaptureMode capture_mode;

static void put(const void *from, size_t size) {
  if (used + size <= sizeof written) memcpy(written + used, from, size);
  used += size;
}

size_t fake_take(void *to) {
  size_t size = used;
  memcpy(to, written, size);
  used = 0;
  return size;
}
void fake_next_function(int64_t *function) { next_function = function; }
/* 1: a thread captures, and modules are loaded in relaxed mode only; 2: not even then. */
void fake_capture(int how) { captures = how; }
int fake_capture_mode(void) { return capture_mode; }
int fake_modules(void) { return modules; }
/* How many more parameters functions are said to take than they do. */
void fake_more_parameters(int number) { more_parameters = number; }
void fake_answer(int code) { answer = code; }
void fake_forget_context(void) { has_context = 0; }
int fake_retained(void) { return contexts; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const int64_t *sizes = (const int64_t *)function;
  put(&config->gridDimX, 7 * sizeof(unsigned));
  put(&config->hStream, sizeof config->hStream);
  put(&config->numAttrs, sizeof config->numAttrs);
  for (unsigned i = 0; i < config->numAttrs; i++) {
    put(&config->attrs[i].id, sizeof config->attrs[i].id);
    put(&config->attrs[i].value, 12);
  }
  put(&function, sizeof function);
  put(&extra, sizeof extra);
  for (int64_t i = 0; i < sizes[0]; i++) put(parameters[i], sizes[1 + i]);
  return answer;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *pitches, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *to = (unsigned char *)map;
  const int words[] = {dtype, rank, interleave, swizzle, promotion, fill};
  memset(map, 0, sizeof *map);
  for (unsigned i = 0; i < 6; i++) to[i] = words[i];
  memcpy(to + 8, &address, 8);
  to[10] |= 1 << 5;  // bit 85: 128 KiB from the base address may be read
  for (unsigned i = 0; i < rank; i++) {
    uint64_t mixed = sizes[i] * 0x9E3779B97F4A7C15u + (i + 1 < rank ? pitches[i] : 0) * 1000003u;
    memcpy(to + 16 + 16 * i, &mixed, 8);
    memcpy(to + 24 + 16 * i, &box[i], 4);
    memcpy(to + 28 + 16 * i, &steps[i], 4);
  }
  return answer;
}

CUresult cuCtxGetCurrent(CUcontext *to) {
  *to = has_context ? (CUcontext)&context : 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext given) {
  has_context = given == (CUcontext)&context;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice device) {
  contexts = device;
  *to = (CUcontext)&context;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr address) {
  memcpy(to, &address, sizeof address);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *to, CUmodule module, const char *name) {
  *to = (CUfunction)next_function;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char **to) {
  *to = code == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : 0;
  return *to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult code, const char **to) {
  *to = code == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES        ? "too many resources requested for launch"
        : code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
                                                        : 0;
  return *to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDriverGetVersion(int *to) { return *to = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CUstreamCaptureMode before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}
#ifndef WITHOUT_PARAMETERS
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  const int64_t *sizes = (const int64_t *)function;
  if ((int64_t)index >= sizes[0] + more_parameters) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = (int64_t)index < sizes[0] ? sizes[1 + index] : 8;
  return CUDA_SUCCESS;
}
#endif
CUresult cuCtxGetDevice(CUdevice *to) { return *to = 0, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *to) { return *to = 0, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *to, int number) { return *to = number, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute attribute, CUdevice device) { return *to = 1 << 20, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *to, CUfunction_attribute attribute, CUfunction function) { return *to = 1024, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *to, const void *code) {
  if (captures == 2 || (captures && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED))
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  modules++;
  return *to = (CUmodule)&context, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *to, CUlimit limit) { return *to = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
