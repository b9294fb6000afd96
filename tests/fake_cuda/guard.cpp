// Preloaded into a process with a CPU build of torch: the dispatcher and autograd accept tensors on "cuda".
// torch's own FakeGuardImpl is their device guard; the hooks say that there is one device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <optional>

namespace {

c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

struct OneDevice : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

}  // namespace

#define REPLACES_TORCHS_OWN __attribute__((visibility("default")))

namespace at::detail {
REPLACES_TORCHS_OWN const at::CUDAHooksInterface& getCUDAHooks() {
  static OneDevice hooks;
  return hooks;
}
}  // namespace at::detail

namespace at::accelerator {
REPLACES_TORCHS_OWN std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator
