// What load_bench reports.
#ifndef LOGITD_BENCH_LOAD_REPORT_H_
#define LOGITD_BENCH_LOAD_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>

#include "bench/load/load.h"
#include "logitd/v1/server.pb.h"

namespace logitd::bench {

// One scenario in figures. Times in nanoseconds, rates per second, gigabytes of 10^9 bytes.
nlohmann::ordered_json Summarise(const Measured& measured);

// The same, as lines of a table under TableHeader().
std::string TableHeader();
std::string TableLines(const nlohmann::ordered_json& summary);

// Where the figures come from: both ends, and when.
nlohmann::ordered_json Provenance(const v1::GetInfoResponse& info, const std::string& address);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_LOAD_REPORT_H_
