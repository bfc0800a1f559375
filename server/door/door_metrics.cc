#include "server/door/door_metrics.h"

#include <string>
#include <utility>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"

namespace logitd::door {
namespace {

using prometheus::Family;

Family<prometheus::Gauge>& Gauges(prometheus::Registry& registry, const char* name,
                                  const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

Family<prometheus::Counter>& Counters(prometheus::Registry& registry, const char* name,
                                      const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

}  // namespace

DoorMetrics::DoorMetrics(std::shared_ptr<prometheus::Registry> registry, int64_t max_connections,
                         int64_t max_connection_bytes, absl::Span<const std::string_view> reasons)
    : registry_(std::move(registry)),
      open_(&Gauges(*registry_, "logitd_connections", "Open connections.").Add({})),
      resident_(&Gauges(*registry_, "logitd_resident_bytes", "Resident memory.").Add({})),
      resident_limit_(&Gauges(*registry_, "logitd_resident_bytes_limit",
                              "Most resident memory that the server allows itself.")
                           .Add({})),
      refused_(&Counters(*registry_, "logitd_connections_refused_total",
                         "Connections closed as soon as they were accepted.")
                    .Add({})),
      too_large_(&Counters(*registry_, "logitd_messages_too_large_total",
                           "Calls ended for a message larger than the server takes.")
                      .Add({})) {
  Gauges(*registry_, "logitd_connections_limit", "Most connections that may be open.")
      .Add({})
      .Set(static_cast<double>(max_connections));
  Gauges(*registry_, "logitd_connection_bytes_limit", "Most that connections may hold.")
      .Add({})
      .Set(static_cast<double>(max_connection_bytes));
  auto& family = Counters(*registry_, "logitd_connections_cut_total",
                          "Connections that the server ended, by why.");
  for (const std::string_view reason : reasons) {
    cut_[reason] = &family.Add({{"reason", std::string(reason)}});
  }
}

void DoorMetrics::OnOpen(int64_t open) { open_->Set(static_cast<double>(open)); }

void DoorMetrics::OnRefused() { refused_->Increment(); }

void DoorMetrics::OnCut(std::string_view reason) { cut_.at(reason)->Increment(); }

void DoorMetrics::OnTooLarge() { too_large_->Increment(); }

void DoorMetrics::OnHandshake(std::string_view end) { handshakes_.at(end)->Increment(); }

void DoorMetrics::AddTls(absl::Span<const std::string_view> ends) {
  auto& family =
      Counters(*registry_, "logitd_tls_handshakes_total", "TLS handshakes that ended, by how.");
  for (const std::string_view end : ends) {
    handshakes_[end] = &family.Add({{"result", std::string(end)}});
  }
  expiry_ = &Gauges(*registry_, "logitd_tls_certificate_expiry_seconds",
                    "When the server's certificate expires, as a Unix time.")
                 .Add({});
}

void DoorMetrics::SetCertificateExpiry(absl::Time expiry) {
  expiry_->Set(static_cast<double>(absl::ToUnixSeconds(expiry)));
}

void DoorMetrics::AddFile(const std::string& file) {
  auto& stale = Gauges(*registry_, "logitd_file_stale",
                       "1: the file holds something that the server cannot use.");
  auto& reads =
      Counters(*registry_, "logitd_file_reads_total", "Changes of the file that the server read.");
  files_[file] = {.stale = &stale.Add({{"file", file}}),
                  .used = &reads.Add({{"file", file}, {"result", "used"}}),
                  .refused = &reads.Add({{"file", file}, {"result", "refused"}})};
}

void DoorMetrics::OnRead(const std::string& file, bool used) {
  const FileSeries& series = files_.at(file);
  series.stale->Set(used ? 0 : 1);
  (used ? series.used : series.refused)->Increment();
}

void DoorMetrics::SetResident(int64_t bytes, int64_t limit) {
  resident_->Set(static_cast<double>(bytes));
  resident_limit_->Set(static_cast<double>(limit));
}

}  // namespace logitd::door
