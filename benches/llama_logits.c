// The logits of texts by llama.cpp, for benches/llama_formats.py.
//
//     llama_logits MODEL.gguf < TOKENS > LOGITS
//
// Standard input: for each text the number of its tokens and the tokens, all int32. Standard output: a row of f32 logits for
// each token, in order. Each text is seen alone.
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level >= GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    llama_log_set(silent, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 1024;
    // keys and values as exact as the model that is compared with
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const char *threads = getenv("THREADS");
    if (threads) params.n_threads = params.n_threads_batch = atoi(threads);
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) return 1;
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int count; fread(&count, sizeof count, 1, stdin) == 1;) {
        if (count < 1 || count > 1024) return 3;
        struct llama_batch batch = llama_batch_init(count, 0, 1);
        if (fread(batch.token, sizeof(llama_token), count, stdin) != (size_t)count) return 3;
        batch.n_tokens = count;
        for (int i = 0; i < count; i++) {
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        llama_memory_clear(llama_get_memory(context), true);
        if (llama_decode(context, batch) != 0) return 4;
        for (int i = 0; i < count; i++) {
            if (fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, stdout) != (size_t)vocabulary) return 5;
        }
        llama_batch_free(batch);
    }
    return 0;
}
