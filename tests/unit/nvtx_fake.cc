// A profiler of the tests, which NVTX loads (NVTX_INJECTION64_PATH): it notes ranges of domains.
#include <nvtx3/nvToolsExt.h>

#include <string>

namespace {

std::string& said() {
  static std::string text;
  return text;
}

nvtxDomainHandle_t NVTX_API create(const char* name) {
  said() += std::string(name) + ":";
  static int domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}
int NVTX_API push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  said() += std::string(" +") + event->message.ascii;
  return 0;
}
int NVTX_API pop(nvtxDomainHandle_t) {
  said() += " -";
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* nvtx_fake_said() {
  return said().c_str();
}

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t tables) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) == 0) {
    return 0;
  }
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
