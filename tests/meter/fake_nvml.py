"""A stand-in for the pynvml module: two cards with constant power, and errors on demand.

For what needs no C compiler and no waiting; nvml_sim is the one that behaves like a card.
"""

import time
from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, text="Not Supported", value=3):
        super().__init__(text)
        self.value = value


class FakeNvml:
    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_FOUND = 6
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TOTAL_POWER_SAMPLES = 0

    def __init__(self, counter=True, buffer=True, instant=True, present=True):
        self.counter, self.buffer, self.instant, self.present = counter, buffer, instant, present
        self.failing = False
        self.energy_mj = 1_000_000
        self.counter_calls = 0

    def __getattr__(self, name):
        """Whatever this card has no answer to, it says so as a driver does."""

        def not_supported(*arguments):
            raise NVMLError()

        return not_supported

    def nvmlInit(self):  # noqa: N802
        if not self.present:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{'ab'[handle] * 8}"

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return b"Fake H200"

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.0"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        if not self.counter:
            raise NVMLError("Not Supported")
        self.counter_calls += 1
        self.energy_mj += 50_000
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        if self.failing:
            raise NVMLError("GPU is lost")
        return 90_000

    def nvmlDeviceGetFieldValues(self, handle, fields):  # noqa: N802
        if self.failing:
            raise NVMLError("GPU is lost")
        return [SimpleNamespace(nvmlReturn=0 if self.instant else 3, value=SimpleNamespace(uiVal=100_000))]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=3 * 1024**2, total=100 * 1024**2)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=50, memory=10)

    def nvmlDeviceGetTemperature(self, handle, kind):  # noqa: N802
        return 40

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return 0x24

    def nvmlDeviceGetSamples(self, handle, kind, last_seen):  # noqa: N802
        if not self.buffer:
            raise NVMLError("Not Supported")
        now = time.time_ns() // 1000
        stamps = [now - 40_000, now - 20_000]
        return 1, [SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=101_000)) for t in stamps]
