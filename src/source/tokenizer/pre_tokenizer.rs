//! Pre-tokenizers of byte-pair encodings, by their names in `tokenizer.ggml.pre`.
//!
//! The names are llama.cpp's; each stands for the rules of one or more published `tokenizer.json` files. A text is
//! divided by all patterns in turn: each one divides the pieces that the patterns before it leave.

/// Pre-tokenizer of a byte-pair encoding.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    /// Patterns of pieces. Without any, GPT-2's pattern applies.
    pub(super) patterns: &'static [&'static str],
    /// Whether texts are normalized to NFC.
    pub(super) nfc: bool,
    /// Whether every digit is a piece, before GPT-2's pattern applies.
    pub(super) single_digits: bool,
    /// Whether a piece that is a token is taken whole, even if no merges lead to it.
    pub(super) ignores_merges: bool,
    /// Handling of the begin token.
    pub(super) bos: Bos,
    /// Number of end tokens between two texts, for encoders, which end every text.
    pub(super) between_two: Option<usize>,
    /// Whether tokens are UTF-8 with U+2581 for spaces, instead of GPT-2's letters for bytes.
    pub(super) utf8: bool,
}

/// Handling of the begin token, where the metadata leaves it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bos {
    /// Not added unless the metadata says so.
    Optional,
    /// Added unless the metadata says otherwise.
    Default,
    /// Always added, whatever the metadata says.
    Always,
    /// Never added, whatever the metadata says.
    Never,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const JAIS2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|",
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|",
    r"\s{1,2}(?!\S)|\s{1}"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const YOUTU: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const SEED_CODER: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const BAILING: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]|\s+(?!\S)|\s+"
);
const EXAONE_MOE: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|",
    r"\s*[\r\n]|\s+(?!\S)|\s+"
);
const MINICPM5: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const THREE_DIGITS: &str = r"\p{N}{1,3}";
/// Groups of three digits, counted from the end of a number.
const THOUSANDS: &str = r"\d{1,3}(?=(?:\d{3})*\b)";
const DEFAULT_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";
const FALCON_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{964}\u{6D4}\u{60C})]+";
const HAN: &str = "[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
const HAN_AND_KANA: &str = "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";
const DEEPSEEK_LETTERS: &str = concat!(
    "\\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}",
    "\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-",
    "\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}",
    "\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}",
    "\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-",
    "\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}",
    "\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}",
    "\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}",
    "\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}",
    "\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}",
    "\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}",
    "\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}]+"
);
const DEEPSEEK_PUNCTUATION: &str = "\\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+";
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const SPARK: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
);
const YOUTU_ASIAN: &str = concat!(
    "[\u{AC00}-\u{D7A3}\u{3131}-\u{318E}]+|[\u{FF01}\u{2026}\u{201C}\u{201D}\u{2018}\u{2019}\u{2014}\u{FF1A}",
    "\u{FF1B}\u{FF0C}\u{3001}-\u{303F}\u{FE30}-\u{FE4F}]+|[\u{3105}-\u{312F}]+|[\u{4E00}-\u{9FA5}\u{3040}-",
    "\u{309F}\u{30A0}-\u{30FF}]+"
);
const LINES: &str = r"[^\n]+|[\n]+";

const PLAIN: PreTokenizer = PreTokenizer {
    patterns: &[],
    nfc: false,
    single_digits: false,
    ignores_merges: false,
    bos: Bos::Optional,
    between_two: None,
    utf8: false,
};
const LIKE_LLAMA3: PreTokenizer =
    PreTokenizer { patterns: &[LLAMA3], ignores_merges: true, bos: Bos::Default, ..PLAIN };
const LIKE_QWEN2: PreTokenizer = PreTokenizer { patterns: &[QWEN2], nfc: true, ..PLAIN };
const LIKE_DEEPSEEK3: PreTokenizer = by(&[THREE_DIGITS, HAN_AND_KANA, DEEPSEEK3]);
const LIKE_GLM: PreTokenizer = PreTokenizer { patterns: &[LLAMA3], bos: Bos::Never, ..PLAIN };
const LIKE_GPT_NEOX: PreTokenizer = PreTokenizer { nfc: true, ..PLAIN };
const SINGLE_DIGITS: PreTokenizer = PreTokenizer { single_digits: true, ..PLAIN };
const LIKE_GEMMA4: PreTokenizer = PreTokenizer { utf8: true, ..PLAIN };

const fn by(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { patterns, ..PLAIN }
}

/// Name of the pre-tokenizer in files that name none.
pub(super) const DEFAULT: &str = "default";

/// Pre-tokenizers by name.
const TABLE: &[(&[&str], PreTokenizer)] = &[
    (&[DEFAULT], by(&[DEFAULT_PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])),
    (&["falcon"], by(&[FALCON_PUNCTUATION, GPT2, "[0-9][0-9][0-9]"])),
    (&["gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"], PLAIN),
    (&["mpt", "olmo"], LIKE_GPT_NEOX),
    (&["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"], LIKE_QWEN2),
    (&["qwen35"], PreTokenizer { patterns: &[QWEN35], ..LIKE_QWEN2 }),
    (&["stablelm2", "hunyuan", "solar-open", "grok-2"], by(&[QWEN2])),
    (&["ufakzeka"], by(&[UFAKZEKA])),
    (&["laguna"], by(&[LINES, QWEN2])),
    (&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], LIKE_LLAMA3),
    (&["dbrx", "olmo2", "smaug-bpe"], by(&[LLAMA3])),
    (&["jais-2"], by(&[JAIS2])),
    (&["chatglm-bpe"], LIKE_GLM),
    (&["glm4", "glm5"], PreTokenizer { ignores_merges: true, ..LIKE_GLM }),
    (&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], by(&[GPT4O])),
    (&["granite-embed-multi-97m"], PreTokenizer { ignores_merges: true, ..by(&[GPT4O]) }),
    (&["tiny_aya", "cohere2moe"], by(&[THOUSANDS, GPT4O])),
    (&["tekken"], PreTokenizer { patterns: &[TEKKEN], ..LIKE_LLAMA3 }),
    (&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"], SINGLE_DIGITS),
    (&["command-r"], PreTokenizer { nfc: true, ..SINGLE_DIGITS }),
    (&["exaone-moe"], by(&[EXAONE_MOE])),
    (&["deepseek-llm"], by(&["[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", HAN, r"\p{N}+"])),
    (&["deepseek-coder"], by(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, DIGIT])),
    (&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], LIKE_DEEPSEEK3),
    (&["spark2_5"], by(&[THREE_DIGITS, HAN_AND_KANA, SPARK, DIGIT])),
    (&["youtu"], PreTokenizer { ignores_merges: true, ..by(&[YOUTU_ASIAN, YOUTU]) }),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], by(&[BAILING])),
    (&["seed-coder"], by(&[SEED_CODER])),
    (&["minicpm5"], PreTokenizer { ignores_merges: true, ..by(&[THREE_DIGITS, MINICPM5]) }),
    (&["poro-chat", "bloom", "gpt3-finnish"], by(&[BLOOM])),
    (&["viking"], by(&[BLOOM, DIGIT])),
    (&["gemma4"], PreTokenizer { bos: Bos::Always, ..LIKE_GEMMA4 }),
    (&["granite-embed-multi-311m", "sarvam-moe"], LIKE_GEMMA4),
    (&["roberta-bpe"], PreTokenizer { between_two: Some(2), ..PLAIN }),
    (&["modern-bert"], PreTokenizer { nfc: true, between_two: Some(1), ..PLAIN }),
];

impl PreTokenizer {
    /// Returns the pre-tokenizer of a name.
    pub(super) fn of(name: &str) -> Option<&'static Self> {
        TABLE.iter().find(|(names, _)| names.contains(&name)).map(|(_, rules)| rules)
    }

    /// Returns all names.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().flat_map(|(names, _)| names.iter().copied())
    }
}
