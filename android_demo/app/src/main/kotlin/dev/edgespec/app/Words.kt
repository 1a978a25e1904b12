package dev.edgespec.app

import java.util.Locale

/** What the app says, in the language of the phone: English, or Korean. */
fun say(english: String): String = if (Locale.getDefault().language == "ko") KOREAN[english] ?: english else english

val KOREAN = mapOf(
    "Chat" to "채팅", "Translate" to "번역", "Listen" to "듣기", "Bench" to "속도", "Plan" to "메모리", "Proof" to "검증",
    "Import" to "가져오기", "Import a bundle: pick its folder" to "번들 가져오기: 폴더를 고르세요",
    "Send" to "보내기", "Stop" to "중지", "New chat" to "새 채팅", "Share" to "공유", "Measure" to "측정", "Compare" to "비교", "Record" to "녹음",
    "Your message" to "메시지", "Prompts, one a line" to "프롬프트, 한 줄에 하나", "Show refused guesses" to "거절된 추측 보기",
    "Decoding method" to "디코딩 방법", "Memory budget" to "메모리 예산", "Share the report" to "보고서 공유",
    "Text, a line at a time" to "번역할 글, 한 줄씩", "From" to "원문 언어", "To" to "번역 언어", "Spoken language" to "말하는 언어",
    "any language" to "모든 언어", "Translate into English" to "영어로 번역", "Show times" to "시간 보기",
    "This bundle's model does not read texts to translate" to "이 번들의 모델은 글을 번역하지 않습니다",
    "This bundle's model does not hear" to "이 번들의 모델은 소리를 듣지 못합니다",
    "Import a bundle: a folder made by `edgespec export`" to "번들을 가져오세요: `edgespec export`로 만든 폴더",
    "Loading" to "불러오는 중", "Copying" to "복사하는 중", "Reading the prompt" to "프롬프트를 읽는 중", "Reading the text" to "글을 읽는 중",
    "Measuring" to "측정하는 중", "Comparing" to "비교하는 중", "Stopped" to "중지됨", "Transcribing" to "받아쓰는 중",
    "Recording: press Stop when all is said" to "녹음 중: 말이 끝나면 중지를 누르세요",
    "Out of memory: choose a shorter text or a smaller bundle" to "메모리가 부족합니다: 더 짧은 글이나 더 작은 번들을 고르세요",
    "The microphone may not be used" to "마이크를 사용할 수 없습니다",
)
