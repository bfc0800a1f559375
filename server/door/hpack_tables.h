// The tables of HPACK: the fields that both sides know, and the Huffman code.
// Source: RFC 7541, appendices A and B.
#ifndef LOGITD_SERVER_DOOR_HPACK_TABLES_H_
#define LOGITD_SERVER_DOOR_HPACK_TABLES_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace logitd::door {

struct StaticField {
  std::string_view name;
  std::string_view value;
};
// The fields 1 to 61.
inline constexpr auto kStaticFields = std::to_array<StaticField>({
    {":authority", ""},
    {":method", "GET"},
    {":method", "POST"},
    {":path", "/"},
    {":path", "/index.html"},
    {":scheme", "http"},
    {":scheme", "https"},
    {":status", "200"},
    {":status", "204"},
    {":status", "206"},
    {":status", "304"},
    {":status", "400"},
    {":status", "404"},
    {":status", "500"},
    {"accept-charset", ""},
    {"accept-encoding", "gzip, deflate"},
    {"accept-language", ""},
    {"accept-ranges", ""},
    {"accept", ""},
    {"access-control-allow-origin", ""},
    {"age", ""},
    {"allow", ""},
    {"authorization", ""},
    {"cache-control", ""},
    {"content-disposition", ""},
    {"content-encoding", ""},
    {"content-language", ""},
    {"content-length", ""},
    {"content-location", ""},
    {"content-range", ""},
    {"content-type", ""},
    {"cookie", ""},
    {"date", ""},
    {"etag", ""},
    {"expect", ""},
    {"expires", ""},
    {"from", ""},
    {"host", ""},
    {"if-match", ""},
    {"if-modified-since", ""},
    {"if-none-match", ""},
    {"if-range", ""},
    {"if-unmodified-since", ""},
    {"last-modified", ""},
    {"link", ""},
    {"location", ""},
    {"max-forwards", ""},
    {"proxy-authenticate", ""},
    {"proxy-authorization", ""},
    {"range", ""},
    {"referer", ""},
    {"refresh", ""},
    {"retry-after", ""},
    {"server", ""},
    {"set-cookie", ""},
    {"strict-transport-security", ""},
    {"transfer-encoding", ""},
    {"user-agent", ""},
    {"vary", ""},
    {"via", ""},
    {"www-authenticate", ""},
});
static_assert(kStaticFields.size() == 61);

// The code is canonical: the number of codes of each length is enough to find where a symbol ends.
inline constexpr int kMaxCodeBits = 30;
inline constexpr std::array<uint32_t, kMaxCodeBits + 1> kCodes = [] {
  std::array<uint32_t, kMaxCodeBits + 1> codes = {};
  codes[5] = 10;
  codes[6] = 26;
  codes[7] = 32;
  codes[8] = 6;
  codes[10] = 5;
  codes[11] = 3;
  codes[12] = 2;
  codes[13] = 6;
  codes[14] = 2;
  codes[15] = 3;
  codes[19] = 3;
  codes[20] = 8;
  codes[21] = 13;
  codes[22] = 26;
  codes[23] = 29;
  codes[24] = 12;
  codes[25] = 4;
  codes[26] = 15;
  codes[27] = 19;
  codes[28] = 29;
  codes[30] = 4;
  return codes;
}();
// The first code of each length; longer codes are larger.
inline constexpr std::array<uint32_t, kMaxCodeBits + 1> kFirstCode = [] {
  std::array<uint32_t, kMaxCodeBits + 1> first = {};
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    first[bits] = (first[bits - 1] + kCodes[bits - 1]) << 1;
  }
  return first;
}();
static_assert(kFirstCode[kMaxCodeBits] + kCodes[kMaxCodeBits] == 1U << kMaxCodeBits,
              "the code is complete");
// Where the symbols of each length begin in kSymbols.
inline constexpr std::array<uint32_t, kMaxCodeBits + 1> kFirstSymbol = [] {
  std::array<uint32_t, kMaxCodeBits + 1> first = {};
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    first[bits] = first[bits - 1] + kCodes[bits - 1];
  }
  return first;
}();
// The symbols by their codes. The code after the last one ends a string (EOS); no string has it.
inline constexpr std::array<uint8_t, 256> kSymbols = {
    48,  49,  50,  97,  99,  101, 105, 111, 115, 116, 32,  37,  45,  46,  47,  51,  52,  53,  54,
    55,  56,  57,  61,  65,  95,  98,  100, 102, 103, 104, 108, 109, 110, 112, 114, 117, 58,  66,
    67,  68,  69,  70,  71,  72,  73,  74,  75,  76,  77,  78,  79,  80,  81,  82,  83,  84,  85,
    86,  87,  89,  106, 107, 113, 118, 119, 120, 121, 122, 38,  42,  44,  59,  88,  90,  33,  34,
    40,  41,  63,  39,  43,  124, 35,  62,  0,   36,  64,  91,  93,  126, 94,  125, 60,  96,  123,
    92,  195, 208, 128, 130, 131, 162, 184, 194, 224, 226, 153, 161, 167, 172, 176, 177, 179, 209,
    216, 217, 227, 229, 230, 129, 132, 133, 134, 136, 146, 154, 156, 160, 163, 164, 169, 170, 173,
    178, 181, 185, 186, 187, 189, 190, 196, 198, 228, 232, 233, 1,   135, 137, 138, 139, 140, 141,
    143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174, 175, 180, 182, 183, 188, 191,
    197, 231, 239, 9,   142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237, 199, 207, 234, 235,
    192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255, 203, 204, 211, 212,
    214, 221, 222, 223, 241, 244, 245, 246, 247, 248, 250, 251, 252, 253, 254, 2,   3,   4,   5,
    6,   7,   8,   11,  12,  14,  15,  16,  17,  18,  19,  20,  21,  23,  24,  25,  26,  27,  28,
    29,  30,  31,  127, 220, 249, 10,  13,  22};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_HPACK_TABLES_H_
