// Which path is taken: the first of those this processor has, or the one a test asks for.

bool cpu_has(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "amx")) return cpu_has("avx512");  // the path itself asks for the rest
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return !strcmp(name, "portable");
}

const Path* find_path(const char* name) {
    struct { const char* name; const Path* (*path)(); } const all[] = {
        {"amx", amx_path}, {"avx512", avx512_path}, {"avx2", avx2_path}, {"portable", portable_path}};
    for (const auto& one : all)
        if ((!name || !strcmp(name, one.name)) && cpu_has(one.name))  // before anything of that path runs
            if (const Path* path = one.path()) return path;
    return nullptr;
}

const Path* chosen = find_path(nullptr);  // when the library is opened, before there are threads
const Path& path() { return *chosen; }
