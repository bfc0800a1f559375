#include "server/engine/model_types.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"

namespace logitd::engine {
namespace {

struct Types {
  ModelFamily family;
  const char* types;
};
constexpr Types kFamilies[] = {{{.ties = true, .surveyed = true}, R"(
bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom
camembert cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl data2vec-text electra ernie
ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa jetmoe lfm2 lfm2_moe lfm3
mamba marian mbart megatron-bert minicpm3 modernbert-decoder mpt mvp openai-gpt opt pegasus plbart
prophetnet recurrent_gemma roberta roberta-prelayernorm roc_bert roformer smollm3 starcoder2 trocr
vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya
)"},
                               {{.ties = false, .surveyed = true}, R"(
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt codegen cwm dbrx
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text
emu3 exaone4 exaone_moe falcon_h1 flex_olmo flint fuyu git glm glm4 glm4_moe glm4_moe_lite
glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
inkling2_text inkling_text internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna llama
llama4 llama4_text longcat_flash mamba2 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
ministral ministral3 mistral mixtral mllama moshi moss_transcribe_diarize musicgen musicgen_melody
nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal
phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen4_exp qwen4_exp_text reformer rembert rwkv seed_oss solar_open stablelm xlstm
)"},
                               {{.ties = true, .surveyed = false}, R"(
aya_vision blip blip-2 blip_text_model cohere2_vision diffusion_gemma diffusion_gemma_text
ernie4_5_vl_moe ernie4_5_vl_moe_text florence2 granite_docling granite_docling_text hunyuan_vl
hunyuan_vl_text instructblip instructblipvideo kosmos-2 kosmos-2.5 kosmos_2_5_text_model
kosmos_2_text_model lfm2_vl lfm3_vl mega paddleocr_vl paddleocr_vl_text paligemma pixtral
pp_chart2table qdqbert shieldgemma2 speech_to_text_2 t5gemma2 t5gemma2_decoder transfo-xl udop
vision-encoder-decoder xlm-prophetnet
)"},
                               {{.ties = false, .surveyed = false}, R"(
Glm4vMoe_text aria chameleon code_llama cohere_compass cosmos3_edge cosmos3_edge_text cosmos3_omni
deepseek_ocr2 deepseek_ocr2_text deepseek_vl deepseek_vl_hybrid emu3_text_model evolla exaone4_5
fast_vlm glm46v glm4v glm4v_moe glm4v_moe_text glm4v_text glm5_next glm5_next_text glm_ocr
glm_ocr_text glmga granite4_vision granite4_vision_text hyperclovax_vision_v2 idefics idefics2
idefics3 inkling2 inkling_mm_model internvl janus kimi_k25 lighton_ocr llava llava_next
llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral4
mistral_large4 mistral_large4_text mllama_text_model molmo2 molmo2_text muse_glimmer
muse_glimmer_text muse_spark muse_spark_text musicgen_decoder musicgen_melody_decoder
nemotron_h_omni open-llama ovis2 perception_lm pi0 pix2struct pix2struct_text_model pp_formulanet
pp_formulanet_text qianfan_ocr qwen2_5_omni_text qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text
qwen2_vl qwen2_vl_text qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
qwen3_vl_moe_text qwen3_vl_text smolvlm step3p5 step3p7 unlimited_ocr unlimited_ocr_text
video_llama_3 video_llava vipllava
)"}};

}  // namespace

std::optional<ModelFamily> FamilyOf(std::string_view model_type) {
  static const auto* const families = [] {
    auto* by_type = new std::map<std::string, ModelFamily, std::less<>>;
    for (const auto& [family, text] : kFamilies) {
      const std::vector<std::string> types =
          absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
      for (const std::string& type : types) by_type->emplace(type, family);
    }
    return by_type;
  }();
  const auto found = families->find(model_type);
  return found != families->end() ? std::optional(found->second) : std::nullopt;
}

}  // namespace logitd::engine
