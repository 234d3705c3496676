// Eight CUDA devices as far as a CPU build of torch asks before it makes a tensor that says cuda:N.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::DeviceIndex& current() {
  static thread_local c10::DeviceIndex index = 0;
  return index;
}

struct SimulatedCuda final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  c10::Device getDevice() const override { return {static_type, current()}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void setDevice(c10::Device device) const override { current() = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current() = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedCuda)

}  // namespace
