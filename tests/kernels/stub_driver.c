// A libcuda that runs nothing: it says what it was asked, a line each, so that a launch can be followed without a GPU.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void* current = 0;
static void* stack[8];
static int depth = 0;

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  struct { int id; char pad[4]; char value[64]; } * attributes;
  unsigned count;
} Config;

int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* n) { return *n = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  return *value = which == 75 ? 9 : which == 76 ? 0 : which == 97 ? 232448 : -1, 0;  // capability 9.0, 227 KB of shared memory
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(intptr_t)(0x1000 + device), 0; }
int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = current, current = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = stack[--depth], 0; }
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuModuleLoadData(void** module, const void* cubin) { return *module = (void*)2, memcmp(cubin, "\177ELF", 4) ? 200 : 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return *function = (void*)3, strcmp(name, "axpy"); }
int cuFuncSetAttribute(void* function, int which, int value) { return printf("attribute %d = %d\n", which, value), 0; }
int cuFuncLoad(void* function) { return 0; }
int cuFuncGetParamInfo(void* function, size_t i, size_t* offset, size_t* size) {
  static const size_t sizes[] = {32, 4, 4, 8};
  return i < 4 ? *size = sizes[i], 0 : 1;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void* function, int threads, size_t shared) { return *n = 3, 0; }
int cuGetErrorString(int code, const char** text) { return *text = "as the stub was told", 0; }

int cuLaunchKernelEx(const Config* c, void* function, void** args, void** extra) {
  printf("launch grid %u %u %u block %u shared %u stream %ld context %lx", c->grid[0], c->grid[1], c->grid[2], c->block[0],
         c->shared, (long)c->stream, (long)current);
  for (unsigned i = 0; i < c->count; i++) printf(" attribute %d=%d", c->attributes[i].id, *(int*)c->attributes[i].value);
  struct { void *x, *y; long long stride; int count; float bias; }* s = args[0];
  printf(" args %lx %lx %lld %d %g | %g %d %lx\n", (long)s->x, (long)s->y, s->stride, s->count, s->bias, *(float*)args[1],
         *(int*)args[2], *(long*)args[3]);
  return c->grid[2] == 13 ? 1 : 0;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int l2, int fill) {
  memset(map, 7, 128);
  printf("map type %d rank %u at %lx sizes %lu %lu stride %lu box %u %u steps %u %u swizzle %d l2 %d fill %d off %lu\n", type, rank,
         (long)address, sizes[0], sizes[1], strides[0], box[0], box[1], steps[0], steps[1], swizzle, l2, fill, (uintptr_t)map % 64);
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  char later[128];
  void* self = dlopen("libcuda.so.1", RTLD_NOW);
  snprintf(later, sizeof later, "%s_v2", name);
  *function = dlsym(self, later);
  if (!*function) *function = dlsym(self, name);
  if (status) *status = !*function;
  return *function ? 0 : 500;
}
