// The few frames that the door writes itself.
// Source: RFC 9113 (frames), RFC 7541 (HPACK), and gRPC over HTTP/2 (the end of a call).
#ifndef LOGITD_SERVER_DOOR_ANSWER_H_
#define LOGITD_SERVER_DOOR_ANSWER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "server/door/header_list.h"

namespace logitd::door {

void AppendFrameHead(size_t bytes, uint8_t type, uint8_t flags, uint32_t stream, std::string* out);

// A field that neither needs nor changes the table of either side. The name is in lower case.
void AppendField(std::string_view name, std::string_view value, std::string* out);

// The fields of a whole list in the same way. Not longer than list.bytes().
std::string EncodeList(const HeaderList& list);

// The fields that end a call with a status: `code` is gRPC's number, `text` any bytes.
std::string EncodeStatus(int code, std::string_view text);

// The frames that end a call, whose `fields` are encoded: they fit one frame. `ended`: the peer has
// ended its side; otherwise it is told to send no more.
void AppendEnd(uint32_t stream, std::string_view fields, bool ended, std::string* out);

// Ends a stream. `why`: HTTP/2's number of the reason.
void AppendReset(uint32_t stream, uint32_t why, std::string* out);

// GOAWAY: the end of the connection. All calls may have been seen. `text`: any bytes.
void AppendGoAway(uint32_t why, std::string_view text, std::string* out);

// SETTINGS: how many bytes of messages the peer may send on each stream, new or open.
void AppendInitialWindow(uint32_t bytes, std::string* out);
// The peer may send so many more on this stream.
void AppendWindowUpdate(uint32_t stream, uint32_t bytes, std::string* out);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_ANSWER_H_
