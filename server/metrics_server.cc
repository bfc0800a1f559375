#include "server/metrics_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <list>
#include <string_view>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace logitd {
namespace {

constexpr unsigned kIdleSeconds = 10;
constexpr size_t kConnectionBytes = 16 << 10;  // for a request's head
// libmicrohttpd accepts as many at once as are free; it must be able to go beyond ours, to let us
// close the oldest.
constexpr unsigned kMostAtOnce = MetricsServer::kConnections + 16;

int PortOf(int socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

// A socket that listens on the first of the host's addresses that allows it.
absl::StatusOr<int> Listen(const door::Address& address) {
  const addrinfo hints = {
      .ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const absl::Cleanup free = [found] { freeaddrinfo(found); };
  int error = 0;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int one = 1;
    if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
        bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
      return fd;
    }
    error = errno;
    if (fd >= 0) close(fd);
  }
  return absl::UnavailableError(std::strerror(error));
}

class MetricsServerImpl final : public MetricsServer {
 public:
  explicit MetricsServerImpl(std::function<std::string()> page) : page_(std::move(page)) {}

  ~MetricsServerImpl() override {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  // Takes the socket.
  absl::Status Serve(int listening) {
    port_ = PortOf(listening);
    daemon_ = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ITC, 0, nullptr, nullptr,
                               &Answer, this, MHD_OPTION_LISTEN_SOCKET, listening,    //
                               MHD_OPTION_NOTIFY_CONNECTION, &OnConnection, this,     //
                               MHD_OPTION_CONNECTION_LIMIT, kMostAtOnce,              //
                               MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds,           //
                               MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes,  //
                               MHD_OPTION_END);
    if (daemon_ != nullptr) return absl::OkStatus();
    close(listening);
    return absl::UnavailableError("the HTTP server did not start");
  }

  int port() const override { return port_; }

 private:
  using Connections = std::list<MHD_Connection*>;

  // On the server's thread, as each connection begins and ends.
  static void OnConnection(void* self, MHD_Connection* connection, void** context,
                           MHD_ConnectionNotificationCode code) {
    Connections& open = static_cast<MetricsServerImpl*>(self)->open_;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      auto* const place = static_cast<Connections::iterator*>(*context);
      open.erase(*place);
      delete place;
      return;
    }
    *context = new Connections::iterator(open.insert(open.end(), connection));
    if (open.size() <= kConnections) return;
    // libmicrohttpd sees the end of the socket and closes it.
    auto oldest = open.begin();
    std::advance(oldest, open.size() - kConnections - 1);
    shutdown(MHD_get_connection_info(*oldest, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
             SHUT_RDWR);
  }

  // On the server's thread, when the head of a request is there.
  static MHD_Result Answer(void* self, MHD_Connection* connection, const char* url,
                           const char* method, const char* /*version*/, const char* /*upload*/,
                           size_t* upload_bytes, void** request) {
    const std::string_view verb = method;
    const bool reads = verb == MHD_HTTP_METHOD_GET || verb == MHD_HTTP_METHOD_HEAD;
    // The first call of a request has no body yet. An answer then would close the connection.
    if (*request == nullptr && reads) {
      *request = self;
      return MHD_YES;
    }
    if (*upload_bytes > 0) {
      *upload_bytes = 0;
      return MHD_YES;
    }
    unsigned status = MHD_HTTP_OK;
    std::string text;
    if (!reads) {
      status = MHD_HTTP_METHOD_NOT_ALLOWED;
      text = absl::StrCat("method: got ", method, ", allowed GET and HEAD\n");
    } else if (std::string_view(url) != "/metrics") {
      status = MHD_HTTP_NOT_FOUND;
      text = "allowed only the path /metrics\n";
    } else {
      text = static_cast<MetricsServerImpl*>(self)->page_();
    }
    MHD_Response* const response =
        MHD_create_response_from_buffer(text.size(), text.data(), MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                            "text/plain; version=0.0.4; charset=utf-8");
    if (!reads) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    const MHD_Result queued = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return queued;
  }

  const std::function<std::string()> page_;
  int port_ = 0;
  Connections open_;  // the oldest first; only the server's thread uses it
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const door::Address& address, std::function<std::string()> page) {
  const absl::StatusOr<int> listening = Listen(address);
  if (!listening.ok()) return listening.status();
  auto server = std::make_unique<MetricsServerImpl>(std::move(page));
  if (absl::Status status = server->Serve(*listening); !status.ok()) return status;
  return server;
}

}  // namespace logitd
