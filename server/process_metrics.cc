#include "server/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace logitd {
namespace {

using prometheus::MetricType;

prometheus::MetricFamily Family(const char* name, const char* help, MetricType type, double value) {
  prometheus::ClientMetric sample;
  (type == MetricType::Counter ? sample.counter.value : sample.gauge.value) = value;
  return {.name = name, .help = help, .type = type, .metric = {std::move(sample)}};
}

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The fields of /proc/self/stat from the third on, see proc(5): the second is the name of the
// program in parentheses, which may have spaces.
std::vector<std::string> StatFields() {
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(stat.substr(name_end + 2), ' ');
}
constexpr size_t kFirstField = 3;
constexpr size_t kStartTicks = 22 - kFirstField;
constexpr size_t kVirtualBytes = 23 - kFirstField;
constexpr size_t kResidentPages = 24 - kFirstField;

// When the machine started, in seconds since the epoch; 0: not known.
int64_t BootTime() {
  for (absl::string_view line : absl::StrSplit(ReadFile("/proc/stat"), '\n')) {
    int64_t seconds = 0;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtoi(line, &seconds)) return seconds;
  }
  return 0;
}

// -1: not known.
int64_t OpenDescriptors() {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return -1;
  int64_t entries = 0;
  while (readdir(directory) != nullptr) ++entries;
  closedir(directory);
  return entries - 3;  // ".", ".." and the directory itself
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

}  // namespace

std::vector<prometheus::MetricFamily> ProcessMetrics() {
  std::vector<prometheus::MetricFamily> families;
  const auto add = [&](const char* name, const char* help, double value,
                       MetricType type = MetricType::Gauge) {
    families.push_back(Family(name, help, type, value));
  };
  rusage used = {};
  if (getrusage(RUSAGE_SELF, &used) == 0) {
    add("process_cpu_seconds_total", "User and system CPU time.",
        Seconds(used.ru_utime) + Seconds(used.ru_stime), MetricType::Counter);
  }
  const std::vector<std::string> fields = StatFields();
  int64_t start_ticks = 0, virtual_bytes = 0, resident_pages = 0;
  if (fields.size() > kResidentPages && absl::SimpleAtoi(fields[kStartTicks], &start_ticks) &&
      absl::SimpleAtoi(fields[kVirtualBytes], &virtual_bytes) &&
      absl::SimpleAtoi(fields[kResidentPages], &resident_pages)) {
    add("process_resident_memory_bytes", "Resident memory.",
        static_cast<double>(resident_pages) * static_cast<double>(sysconf(_SC_PAGESIZE)));
    add("process_virtual_memory_bytes", "Virtual memory.", static_cast<double>(virtual_bytes));
    static const int64_t boot = BootTime();
    if (boot > 0) {
      add("process_start_time_seconds", "Start of the process, since the epoch.",
          static_cast<double>(boot) +
              static_cast<double>(start_ticks) / static_cast<double>(sysconf(_SC_CLK_TCK)));
    }
  }
  if (const int64_t open = OpenDescriptors(); open >= 0) {
    add("process_open_fds", "Open file descriptors.", static_cast<double>(open));
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    add("process_max_fds", "Most file descriptors that may be open.",
        static_cast<double>(limit.rlim_cur));
  }
  return families;
}

}  // namespace logitd
