package dev.edgespec.app

import java.util.Locale

/** Texts of the app, in the language of the phone: English, or Korean. */
fun say(english: String): String = if (Locale.getDefault().language == "ko") KOREAN[english] ?: english else english

val KOREAN = mapOf(
    "Chat" to "채팅", "Bench" to "속도", "Proof" to "검증", "More" to "더보기",
    "Import a bundle" to "번들 가져오기", "New chat" to "새 채팅", "Licences" to "라이선스",
    "Send" to "보내기", "Stop" to "중지", "Share" to "공유", "Measure" to "측정", "Compare" to "비교",
    "Your message" to "메시지", "Prompts, one a line" to "프롬프트, 한 줄에 하나", "Show rejected guesses" to "거절된 추측 보기",
    "Decoding method" to "디코딩 방법",
    "Import a bundle: a folder made by `edgespec export`" to "번들을 가져오세요: `edgespec export`로 만든 폴더",
    "Loading" to "불러오는 중", "Copying" to "복사하는 중", "Reading the prompt" to "프롬프트를 읽는 중",
    "Measuring" to "측정하는 중", "Comparing" to "비교하는 중", "Stopped" to "중지됨",
    "Work" to "작업", "Working on this device" to "이 기기에서 작업하는 중",
    "Out of memory: choose a shorter text or a smaller bundle" to "메모리가 부족합니다: 더 짧은 글이나 더 작은 번들을 고르세요",
    "Android does not allow this any more: pick it again" to "권한이 없습니다: 다시 고르세요",
    "%s operators, %d tokens of context" to "%s 연산자, 문맥 %d토큰", "%s copied" to "%s 복사됨",
    "%.1f tokens/s, %.0f %% of %d guesses accepted" to "%.1f토큰/초, 추측의 %.0f %% 수락 (모두 %d개)",
    "%d of %d texts equal on this device" to "이 기기에서 같은 글: %d / %d", "This bundle has no golden vectors" to "이 번들에는 검증용 글이 없습니다",
    "The model answered with nothing" to "모델이 답하지 않았습니다", "The chat could not be kept" to "채팅을 저장하지 못했습니다",
    "cut here: ask it to continue" to "여기서 잘렸습니다: 계속하라고 말하세요",
    "What can you do?" to "무엇을 할 수 있나요?", "Tell me a short story" to "짧은 이야기를 들려주세요",
    "Speed over plain decoding (ar), median and 95 % interval" to "일반 디코딩(ar) 대비 속도, 중앙값과 95 % 구간",
    // labels of figures
    "tokens/s" to "토큰/초", "speed-up" to "속도 향상", "tok/round" to "라운드당 토큰", "accepted" to "수락", "same text" to "같은 글",
    "tokens" to "토큰", "result" to "결과", "equal" to "같음", "differs" to "다름",
)
