// CUDA's calls for memory that another process reads, without a GPU. An allocation is a memory file; a handle is its
// process, descriptor, file, size and GPU. FAKE_CUDA_VISIBLE lists this process's GPUs, as CUDA_VISIBLE_DEVICES would.
//
// As CUDA does, it refuses: devices that this process does not see, handles of what is no allocation's first byte or
// was not made by cudaMalloc, an allocation that is gone, one of its own or one that it has open already, and to close
// what is not open. A refusal stays the thread's last error until it is asked for.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Handle {
  char bytes[64];
};

struct Content {
  pid_t pid;
  int fd;
  ino_t file;
  size_t size;
  int gpu;
};
static_assert(sizeof(Content) <= sizeof(Handle));

struct Allocation {
  Content content;
  bool from_malloc;
  bool of_other;
  unsigned long long number;
};

enum { kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201, kAlreadyMapped = 208 };

std::map<char*, Allocation> allocations;
thread_local int current = 0;
thread_local int last_error = kSuccess;
int exported = 0, opened = 0, closed = 0;
unsigned long long made = 0;
char* wanted = nullptr;

int failed(int code) { return last_error = code; }

std::vector<int> visible() {
  std::vector<int> found;
  const char* text = std::getenv("FAKE_CUDA_VISIBLE");
  std::stringstream numbers(text ? text : "");
  for (std::string number; std::getline(numbers, number, ',');) found.push_back(std::stoi(number));
  return found;
}

char* mapped(int fd, size_t size) {
  const int flags = MAP_SHARED | (wanted ? MAP_FIXED_NOREPLACE : 0);
  char* base = static_cast<char*>(mmap(wanted, size, PROT_READ | PROT_WRITE, flags, fd, 0));
  wanted = nullptr;
  return base;
}

int make(void** pointer, size_t size, bool from_malloc) {
  const std::vector<int> gpus = visible();
  if (current >= static_cast<int>(gpus.size())) return failed(kInvalidDevice);
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  struct stat status;
  if (fd < 0 || ftruncate(fd, size) || fstat(fd, &status)) return failed(kInvalidValue);
  char* base = mapped(fd, size);
  allocations[base] = {{getpid(), fd, status.st_ino, size, gpus[current]}, from_malloc, false, ++made};
  *pointer = base;
  return kSuccess;
}

}  // namespace

extern "C" {

int cudaGetDevice(int* device) {
  *device = current;
  return kSuccess;
}

int cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(visible().size())) return failed(kInvalidDevice);
  current = device;
  return kSuccess;
}

int cudaGetLastError() {
  const int code = last_error;
  last_error = kSuccess;
  return code;
}

const char* cudaGetErrorString(int code) {
  switch (code) {
    case kInvalidDevice: return "invalid device ordinal";
    case kInvalidContext: return "invalid device context";
    case kAlreadyMapped: return "already mapped";
    default: return "invalid argument";
  }
}

int cudaMalloc(void** pointer, size_t size) { return make(pointer, size, true); }

// Stands for what expandable segments and torch-memory-saver do: cuMemCreate, cuMemMap.
int fake_map(void** pointer, size_t size) { return make(pointer, size, false); }

int cudaFree(void* pointer) {
  const auto found = allocations.find(static_cast<char*>(pointer));
  if (found == allocations.end() || found->second.of_other) return failed(kInvalidValue);
  munmap(pointer, found->second.content.size);
  close(found->second.content.fd);
  allocations.erase(found);
  return kSuccess;
}

int cuMemGetAddressRange_v2(void** base, size_t* size, void* pointer) {
  auto found = allocations.upper_bound(static_cast<char*>(pointer));
  if (found == allocations.begin()) return kInvalidValue;
  --found;
  if (static_cast<char*>(pointer) >= found->first + found->second.content.size) return kInvalidValue;
  *base = found->first;
  *size = found->second.content.size;
  return kSuccess;
}

int cuPointerGetAttribute(void* value, int attribute, void* pointer) {
  const auto found = allocations.find(static_cast<char*>(pointer));
  if (attribute != 7 || found == allocations.end()) return kInvalidValue;
  *static_cast<unsigned long long*>(value) = found->second.number;
  return kSuccess;
}

int cudaIpcGetMemHandle(Handle* handle, void* pointer) {
  const auto found = allocations.find(static_cast<char*>(pointer));
  if (found == allocations.end() || !found->second.from_malloc || found->second.of_other) return failed(kInvalidValue);
  std::memset(handle, 0, sizeof(Handle));
  std::memcpy(handle, &found->second.content, sizeof(Content));
  ++exported;
  return kSuccess;
}

int cudaIpcOpenMemHandle(void** pointer, Handle handle, unsigned flags) {
  Content content;
  std::memcpy(&content, &handle, sizeof(Content));
  if (flags != 1) return failed(kInvalidValue);
  if (content.pid == getpid()) return failed(kInvalidContext);
  const std::vector<int> gpus = visible();
  if (current >= static_cast<int>(gpus.size()) || gpus[current] != content.gpu) return failed(kInvalidDevice);
  for (const auto& [base, other] : allocations)
    if (other.of_other && other.content.file == content.file) return failed(kAlreadyMapped);
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", content.pid, content.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat status;
  if (fd < 0 || fstat(fd, &status) || status.st_ino != content.file) {
    if (fd >= 0) close(fd);
    return failed(kInvalidValue);
  }
  content.size = status.st_size;
  content.fd = fd;
  char* base = mapped(fd, content.size);
  allocations[base] = {content, true, true, ++made};
  *pointer = base;
  ++opened;
  return kSuccess;
}

int cudaIpcCloseMemHandle(void* pointer) {
  const auto found = allocations.find(static_cast<char*>(pointer));
  if (found == allocations.end() || !found->second.of_other) return failed(kInvalidValue);
  const std::vector<int> gpus = visible();
  if (gpus[current] != found->second.content.gpu) return failed(kInvalidContext);
  munmap(pointer, found->second.content.size);
  close(found->second.content.fd);
  allocations.erase(found);
  ++closed;
  return kSuccess;
}

// Where the next allocation will be.
void fake_place(void* base) { wanted = static_cast<char*>(base); }

// (handles given, opened, closed; a refusal that nobody has asked for)
void fake_counts(int* counts) {
  counts[0] = exported;
  counts[1] = opened;
  counts[2] = closed;
  counts[3] = last_error;
}

}  // extern "C"
