#include "server/door/door_metrics.h"

#include <string>
#include <utility>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"

namespace logitd::door {
namespace {

prometheus::Gauge& AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

}  // namespace

DoorMetrics::DoorMetrics(std::shared_ptr<prometheus::Registry> registry, int64_t max_connections,
                         int64_t max_connection_bytes, absl::Span<const std::string_view> reasons)
    : registry_(std::move(registry)),
      open_(&AddGauge(*registry_, "logitd_connections", "Open connections.")),
      resident_(&AddGauge(*registry_, "logitd_resident_bytes", "Resident memory.")),
      resident_limit_(&AddGauge(*registry_, "logitd_resident_bytes_limit",
                                "Most resident memory that the server allows itself.")),
      refused_(&prometheus::BuildCounter()
                    .Name("logitd_connections_refused_total")
                    .Help("Connections closed as soon as they were accepted.")
                    .Register(*registry_)
                    .Add({})),
      too_large_(&prometheus::BuildCounter()
                      .Name("logitd_messages_too_large_total")
                      .Help("Calls ended for a message larger than the server takes.")
                      .Register(*registry_)
                      .Add({})) {
  AddGauge(*registry_, "logitd_connections_limit", "Most connections that may be open.")
      .Set(static_cast<double>(max_connections));
  AddGauge(*registry_, "logitd_connection_bytes_limit", "Most that connections may hold.")
      .Set(static_cast<double>(max_connection_bytes));
  auto& family = prometheus::BuildCounter()
                     .Name("logitd_connections_cut_total")
                     .Help("Connections that the server ended, by why.")
                     .Register(*registry_);
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
  auto& family = prometheus::BuildCounter()
                     .Name("logitd_tls_handshakes_total")
                     .Help("TLS handshakes that ended, by how.")
                     .Register(*registry_);
  for (const std::string_view end : ends) {
    handshakes_[end] = &family.Add({{"result", std::string(end)}});
  }
  expiry_ = &AddGauge(*registry_, "logitd_tls_certificate_expiry_seconds",
                      "When the server's certificate expires, as a Unix time.");
}

void DoorMetrics::SetCertificateExpiry(absl::Time expiry) {
  expiry_->Set(static_cast<double>(absl::ToUnixSeconds(expiry)));
}

void DoorMetrics::AddFile(const std::string& file) {
  auto& stale = prometheus::BuildGauge()
                    .Name("logitd_file_stale")
                    .Help("1: the file holds something that the server cannot use.")
                    .Register(*registry_);
  auto& reads = prometheus::BuildCounter()
                    .Name("logitd_file_reads_total")
                    .Help("Changes of the file that the server read.")
                    .Register(*registry_);
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
