/* A make-believe libnvidia-ml.so.1 whose GPUs draw a power that the test wrote down, so that every joule is known.
 *
 * It answers the real nvidia-ml-py binding the way an H200 does: counter and power are latched every 100 ms, power usage
 * is a 1 s average, the instant field is the mean of the 25 ms before the latch, the 20 ms sample buffer arrives late,
 * lags and reads 1 % high, and the counter call is slow. All of it, and every error, comes from one text file (named by
 * JOULELAB_NVML_SIM, written by driver.py) which is read again whenever it changes: a test can break a driver in use.
 * Times are seconds on CLOCK_MONOTONIC since `origin_ns`. Struct layouts follow nvidia-ml-py's ctypes definitions. */

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9 };
enum { MAX_GPUS = 16, MAX_POINTS = 20000, MAX_ERRORS = 16, MAX_PROCESSES = 32, MAX_MIGS = 7 };
enum { FIELD_AVERAGE = 185, FIELD_INSTANT = 186, POWER_SAMPLES = 0, VALUE_UNSIGNED_INT = 1 };

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef union { double d; unsigned u; unsigned long long ull; } value_t;
typedef struct { unsigned long long stamp_us; value_t value; } sample_t;
typedef struct {
    unsigned field, scope;
    long long stamp_us, latency_us;
    unsigned value_type, status;
    value_t value;
} field_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;

struct gpu;
struct mig { struct gpu *card; char uuid[96]; };
struct gpu {
    char uuid[96], name[96];
    unsigned minor, utilization[2], temperature_c, clock_mhz[4];
    unsigned long long throttle, memory[2];
    double limit_w, phase_s, refresh_s, average_s, instant_s, counter_us, base_j;
    double sample_step_s, sample_late_s, sample_lag_s, sample_bias, stamp_shift_s;
    unsigned sample_count;
    double square[4]; /* period, duty, low, high; period 0: the points below */
    int n_points, n_errors, n_processes, n_migs, mig_mode;
    double time_s[MAX_POINTS], power_w[MAX_POINTS], energy_j[MAX_POINTS];
    struct { char call[24]; int code; } errors[MAX_ERRORS];
    process_t processes[MAX_PROCESSES];
    struct mig migs[MAX_MIGS];
};

static struct gpu gpus[MAX_GPUS];
static int n_gpus, init_error, initialized;
static long long origin_ns;
static struct stat seen;

/* ---- the control file ---- */

static void start_gpu(struct gpu *g, const char *uuid, unsigned minor) {
    memset(g, 0, offsetof(struct gpu, time_s));
    snprintf(g->uuid, sizeof g->uuid, "%s", uuid);
    snprintf(g->name, sizeof g->name, "NVIDIA H200");
    g->minor = minor;
    g->temperature_c = 40, g->utilization[0] = 50, g->utilization[1] = 20; /* at work, unless a test says otherwise */
    g->clock_mhz[1] = 1980, g->clock_mhz[2] = 3201;
    g->memory[0] = 1ull << 30, g->memory[1] = 141ull << 30;
    g->limit_w = 700, g->base_j = 1000;
    g->refresh_s = 0.1, g->average_s = 1, g->instant_s = 0.025, g->counter_us = 2500;
    g->sample_step_s = 0.02, g->sample_late_s = 0.07, g->sample_lag_s = 0.01, g->sample_bias = 1.01;
    g->sample_count = 119;
}

static void add_point(struct gpu *g, double t, double w) {
    int i = g->n_points;
    if (i == MAX_POINTS) return;
    g->time_s[i] = t, g->power_w[i] = w;
    g->energy_j[i] = i ? g->energy_j[i - 1] + (t - g->time_s[i - 1]) * (w + g->power_w[i - 1]) / 2 : 0;
    g->n_points++;
}

static void take_line(struct gpu *g, const char *key, const char *rest) {
    double v[4] = {0};
    int n = sscanf(rest, "%lf %lf %lf %lf", &v[0], &v[1], &v[2], &v[3]);
#define NUMBER(field) else if (!strcmp(key, #field)) g->field = v[0]
    if (!strcmp(key, "point") && n == 2) add_point(g, v[0], v[1]);
    else if (!strcmp(key, "square") && n == 4) memcpy(g->square, v, sizeof v);
    else if (!strcmp(key, "name")) snprintf(g->name, sizeof g->name, "%s", rest);
    else if (!strcmp(key, "utilization")) g->utilization[0] = v[0], g->utilization[1] = v[1];
    else if (!strcmp(key, "memory")) g->memory[0] = v[0], g->memory[1] = v[1];
    else if (!strcmp(key, "clocks")) g->clock_mhz[1] = v[0], g->clock_mhz[2] = v[1];
    else if (!strcmp(key, "error") && g->n_errors < MAX_ERRORS)
        g->n_errors += 2 == sscanf(rest, "%23s %d", g->errors[g->n_errors].call, &g->errors[g->n_errors].code);
    else if (!strcmp(key, "process") && g->n_processes < MAX_PROCESSES)
        g->processes[g->n_processes++] = (process_t){v[0], v[1], ~0u, ~0u};
    else if (!strcmp(key, "mig") && g->n_migs < MAX_MIGS) {
        g->migs[g->n_migs].card = g;
        snprintf(g->migs[g->n_migs++].uuid, 96, "%s", rest);
    }
    NUMBER(minor); NUMBER(mig_mode); NUMBER(temperature_c); NUMBER(throttle); NUMBER(limit_w); NUMBER(phase_s);
    NUMBER(refresh_s); NUMBER(average_s); NUMBER(instant_s); NUMBER(counter_us); NUMBER(base_j); NUMBER(sample_step_s);
    NUMBER(sample_late_s); NUMBER(sample_lag_s); NUMBER(sample_bias); NUMBER(sample_count); NUMBER(stamp_shift_s);
}

static void read_control(const char *path) {
    char line[160], key[32], rest[96];
    FILE *file = fopen(path, "r");
    if (!file) return;
    n_gpus = init_error = 0;
    while (fgets(line, sizeof line, file)) {
        rest[0] = 0;
        if (sscanf(line, "%31s %95[^\n]", key, rest) < 1) continue;
        if (!strcmp(key, "origin_ns")) origin_ns = atoll(rest);
        else if (!strcmp(key, "init_error")) init_error = atoi(rest);
        else if (!strcmp(key, "gpu") && n_gpus < MAX_GPUS) start_gpu(&gpus[n_gpus], rest, n_gpus), n_gpus++;
        else if (n_gpus) take_line(&gpus[n_gpus - 1], key, rest);
    }
    fclose(file);
}

static int refresh_control(void) {
    struct stat now;
    const char *path = getenv("JOULELAB_NVML_SIM");
    if (!path || stat(path, &now)) return 0;
    if (now.st_ino != seen.st_ino || memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim)) read_control(path);
    seen = now;
    return 1;
}

/* ---- the waveform ---- */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return ((t.tv_sec * 1000000000ll + t.tv_nsec) - origin_ns) * 1e-9;
}

/* Taken once: a sample keeps the stamp it was given, whatever the wall clock does later. */
static long long wall_minus_mono_us(void) {
    static long long difference;
    struct timespec wall, mono;
    if (difference) return difference;
    clock_gettime(CLOCK_REALTIME, &wall);
    clock_gettime(CLOCK_MONOTONIC, &mono);
    return difference = (wall.tv_sec - mono.tv_sec) * 1000000ll + (wall.tv_nsec - mono.tv_nsec) / 1000;
}

static double square_energy_j(const double *s, double t) {
    double cycles = floor(t / s[0]), rest = t - cycles * s[0], high_s = s[0] * s[1];
    double one = high_s * s[3] + (s[0] - high_s) * s[2];
    return cycles * one + (rest < high_s ? rest * s[3] : high_s * s[3] + (rest - high_s) * s[2]);
}

/* Joules from the start of the waveform to t; before its first and after its last point the power is held. */
static double energy_j(const struct gpu *g, double t) {
    int low = 0, high = g->n_points - 1;
    if (g->square[0] > 0) return square_energy_j(g->square, t);
    if (high < 0) return 0;
    if (t <= g->time_s[0]) return g->power_w[0] * (t - g->time_s[0]);
    if (t >= g->time_s[high]) return g->energy_j[high] + g->power_w[high] * (t - g->time_s[high]);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (g->time_s[middle] <= t) low = middle; else high = middle;
    }
    double step = t - g->time_s[low];
    double slope = (g->power_w[high] - g->power_w[low]) / (g->time_s[high] - g->time_s[low]);
    return g->energy_j[low] + step * (g->power_w[low] + slope * step / 2);
}

static double mean_w(const struct gpu *g, double end, double window) {
    return (energy_j(g, end) - energy_j(g, end - window)) / window;
}

static double latch_s(const struct gpu *g) {
    return floor((now_s() - g->phase_s) / g->refresh_s) * g->refresh_s + g->phase_s;
}

/* ---- what every call does first ---- */

static struct gpu *card_of(void *handle) {
    struct mig *m = handle;
    for (int i = 0; i < n_gpus; i++)
        if (m >= gpus[i].migs && m < gpus[i].migs + MAX_MIGS) return m->card;
    return handle;
}

static int is_mig(void *handle) { return card_of(handle) != handle; }

static int error_of(void *handle, const char *call) {
    struct gpu *g = card_of(handle);
    if (!initialized || !refresh_control()) return UNINITIALIZED;
    if (!handle || g < gpus || g >= gpus + n_gpus) return INVALID_ARGUMENT;
    for (int i = 0; i < g->n_errors; i++)
        if (!strcmp(g->errors[i].call, call) || !strcmp(g->errors[i].call, "all")) return g->errors[i].code;
    return SUCCESS;
}

#define ENTER(call) do { int code = error_of(handle, call); if (code) return code; } while (0)
/* A MIG slice has no meter and no clock of its own. */
#define CARD_ONLY() do { if (is_mig(handle)) return NOT_SUPPORTED; } while (0)

static void sleep_us(double us) {
    struct timespec t = {us / 1e6, (long)(us * 1e3) % 1000000000};
    if (us > 0) nanosleep(&t, NULL);
}

/* ---- the library ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!refresh_control()) return DRIVER_NOT_LOADED;
    if (!init_error) initialized++;
    return init_error;
}
int nvmlShutdown(void) { return initialized ? initialized--, SUCCESS : UNINITIALIZED; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, 32, "error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.159.sim"); return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized || !refresh_control()) return UNINITIALIZED;
    *count = n_gpus;
    return init_error;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!initialized || !refresh_control()) return UNINITIALIZED;
    if (index >= (unsigned)n_gpus) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return error_of(*device, "handle");
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!initialized || !refresh_control()) return UNINITIALIZED;
    for (int i = 0; i < n_gpus; i++) {
        if (!strcmp(uuid, gpus[i].uuid)) return *device = &gpus[i], error_of(*device, "handle");
        for (int k = 0; k < gpus[i].n_migs; k++)
            if (!strcmp(uuid, gpus[i].migs[k].uuid)) return *device = &gpus[i].migs[k], SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    ENTER("info");
    snprintf(text, size, "%s", is_mig(handle) ? ((struct mig *)handle)->uuid : card_of(handle)->uuid);
    return SUCCESS;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    ENTER("info");
    snprintf(text, size, "%s%s", card_of(handle)->name, is_mig(handle) ? " MIG 1g.18gb" : "");
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    ENTER("info"); CARD_ONLY();
    *minor = card_of(handle)->minor;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *energy_mj) {
    ENTER("counter"); CARD_ONLY();
    struct gpu *g = handle;
    sleep_us(g->counter_us / 2);
    *energy_mj = (unsigned long long)((g->base_j + energy_j(g, latch_s(g))) * 1000);
    sleep_us(g->counter_us / 2);
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *power_mw) {
    ENTER("power"); CARD_ONLY();
    struct gpu *g = handle;
    *power_mw = lround(mean_w(g, latch_s(g), g->average_s) * 1000);
    return SUCCESS;
}
int nvmlDeviceGetFieldValues(void *handle, int count, field_t *values) {
    ENTER("fields"); CARD_ONLY();
    struct gpu *g = handle;
    for (int i = 0; i < count; i++) {
        int instant = values[i].field == FIELD_INSTANT;
        values[i].status = instant ? error_of(handle, "instant") : error_of(handle, "average");
        if (!instant && values[i].field != FIELD_AVERAGE) values[i].status = NOT_SUPPORTED;
        values[i].value_type = VALUE_UNSIGNED_INT;
        values[i].value.u = lround(mean_w(g, latch_s(g), instant ? g->instant_s : g->average_s) * 1000);
    }
    return SUCCESS;
}
int nvmlDeviceGetSamples(void *handle, unsigned type, unsigned long long last_us, unsigned *value_type, unsigned *count,
                         sample_t *samples) {
    ENTER("samples"); CARD_ONLY();
    struct gpu *g = handle;
    if (type != POWER_SAMPLES) return NOT_SUPPORTED;
    *value_type = VALUE_UNSIGNED_INT;
    if (!samples) return *count = g->sample_count, SUCCESS;
    long long newest = floor((now_s() - g->sample_late_s) / g->sample_step_s), first = newest - g->sample_count + 1;
    double origin_us = origin_ns / 1000 + wall_minus_mono_us() + g->stamp_shift_s * 1e6;
    unsigned filled = 0;
    for (long long k = first; k <= newest && filled < *count; k++) {
        double stamp = k * g->sample_step_s;
        unsigned long long stamp_us = origin_us + stamp * 1e6;
        if (stamp_us <= last_us) continue;
        samples[filled].stamp_us = stamp_us;
        double power_w = g->sample_bias * mean_w(g, stamp - g->sample_lag_s, g->sample_step_s);
        samples[filled++].value.u = lround(1000 * power_w);
    }
    *count = filled;
    return filled ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    ENTER("memory");
    struct gpu *g = card_of(handle);
    *memory = (memory_t){g->memory[1], g->memory[1] - g->memory[0], g->memory[0]};
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *use) {
    ENTER("utilization"); CARD_ONLY();
    struct gpu *g = handle;
    if (g->mig_mode) return NOT_SUPPORTED;
    *use = (utilization_t){g->utilization[0], g->utilization[1]};
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    ENTER("temperature"); CARD_ONLY();
    (void)sensor;
    *celsius = card_of(handle)->temperature_c;
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *mhz) {
    ENTER("clocks"); CARD_ONLY();
    *mhz = card_of(handle)->clock_mhz[type & 3];
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    ENTER("throttle"); CARD_ONLY();
    *reasons = card_of(handle)->throttle;
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *limit_mw) {
    ENTER("limit"); CARD_ONLY();
    *limit_mw = card_of(handle)->limit_w * 1000;
    return SUCCESS;
}
/* A limit that was set holds for all processes, as the driver's does: it is kept beside the control file. */
static void limit_path(char *path, size_t size, void *handle) {
    snprintf(path, size, "%s.limit-%s", getenv("JOULELAB_NVML_SIM"), card_of(handle)->uuid);
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *limit_mw) {
    ENTER("limit"); CARD_ONLY();
    char path[512];
    limit_path(path, sizeof path, handle);
    *limit_mw = card_of(handle)->limit_w * 1000;
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%u", limit_mw) != 1) *limit_mw = 0;
        fclose(file);
    }
    return SUCCESS;
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *low_mw, unsigned *high_mw) {
    ENTER("limit"); CARD_ONLY();
    *low_mw = 200000, *high_mw = 700000;
    return SUCCESS;
}
int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned limit_mw) {
    ENTER("set_limit"); CARD_ONLY();
    char path[512], fresh[520];
    limit_path(path, sizeof path, handle);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "w");
    if (!file) return NOT_SUPPORTED;
    fprintf(file, "%u", limit_mw);
    fclose(file);
    return rename(fresh, path) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    ENTER("processes");
    struct gpu *g = card_of(handle);
    unsigned room = *count;
    *count = g->n_processes;
    if (room < *count) return INSUFFICIENT_SIZE;
    if (processes) memcpy(processes, g->processes, *count * sizeof *processes);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    ENTER("mig"); CARD_ONLY();
    *current = *pending = card_of(handle)->mig_mode;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { ENTER("mig"); *count = MAX_MIGS; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig) {
    ENTER("mig"); CARD_ONLY();
    struct gpu *g = handle;
    if (index >= (unsigned)g->n_migs) return NOT_FOUND;
    *mig = &g->migs[index];
    return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **card) {
    ENTER("mig");
    *card = card_of(handle);
    return SUCCESS;
}
