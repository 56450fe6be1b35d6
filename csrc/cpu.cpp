#include "cpu.h"

#include <stdexcept>

namespace kvern {

namespace {

const KernelTable* table_of(const std::string& name) {
#if defined(KVERN_X86_PATHS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (name == "avx2" && avx2) return avx2_kernels();
#if defined(KVERN_AVX512_PATHS)
#if defined(KVERN_EMULATE_AVX512)
    const bool vnni = avx2, bf16 = avx2;
#else
    const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
#endif
    if (name == "avx512" && bf16) return avx512_kernels();
    if (name == "avx512vnni" && vnni) return avx512vnni_kernels();
#endif
#endif
    if (name == "portable") return portable_kernels();
    return nullptr;
}

}  // namespace

std::vector<std::string> available_paths() {
    std::vector<std::string> names;
    for (const char* name : {"avx512", "avx512vnni", "avx2", "portable"}) {
        if (table_of(name)) names.emplace_back(name);
    }
    return names;
}

const KernelTable* select_path(const std::string& name) {
    const std::vector<std::string> names = available_paths();
    if (name.empty()) return table_of(names.front());
    if (const KernelTable* t = table_of(name)) return t;
    std::string known;
    for (const std::string& n : names) known += (known.empty() ? "" : ", ") + n;
    throw std::invalid_argument("kernel path '" + name + "' cannot run on this machine: choose one of " + known);
}

}  // namespace kvern
