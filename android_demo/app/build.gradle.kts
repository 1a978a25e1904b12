// For Android Studio.  Not exercised by this repository's tests, which build the same sources with Maven; they check that
// versions agree (tests/android/test_gradle.py).
plugins {
    id("com.android.application") version "8.13.0"
    kotlin("android") version "2.4.21"
}

android {
    namespace = "dev.edgespec.app"
    compileSdk = 36
    defaultConfig {
        applicationId = "dev.edgespec.app"
        minSdk = 26
        targetSdk = 36
        versionCode = 1
        versionName = "0.1.0"
        ndk { abiFilters += listOf("arm64-v8a", "x86_64") }
        externalNativeBuild { cmake { arguments += "-DANDROID_STL=c++_shared" } } // which the tokenizers' library wants, too
    }
    ndkVersion = "28.2.13676358" // builds for pages of 16 KB
    externalNativeBuild { cmake { path = file("../../CMakeLists.txt") } } // libedgespec.so
    buildTypes {
        release {
            isMinifyEnabled = true
            proguardFiles(getDefaultProguardFile("proguard-android-optimize.txt"), "r8-rules.pro")
        }
    }
    packaging {
        // desktops' libraries out of the tokenizers' and JNA's archives, 29 MB
        resources.excludes += listOf("native/lib/linux-*/**", "native/lib/osx-*/**", "native/lib/win-*/**", "com/sun/jna/*-*/**")
    }
    sourceSets["main"].kotlin.srcDirs("src/main/kotlin", "../edgespec/src/main/kotlin")
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

// edgespec/runtimes/tokenizer, built by cargo for every ABI (docs/guides/android.md)
val ownTokenizer = listOf("arm64-v8a", "x86_64").all { file("src/main/jniLibs/$it/libedgespec_tokenizer.so").exists() }

dependencies {
    implementation("org.jetbrains.kotlinx:kotlinx-coroutines-core-jvm:1.11.0")
    implementation("com.microsoft.onnxruntime:onnxruntime-android:1.29.0")
    implementation("ai.djl.huggingface:tokenizers:0.33.0")
    if (!ownTokenizer) runtimeOnly("ai.djl.android:tokenizer-native:0.33.0") // its library needs libc++_shared.so beside it
    implementation("com.google.code.gson:gson:2.15.0")
}

// the first start does something at once: an embedded model, where edgespec is installed and no other bundle was put here
val example = tasks.register<Exec>("exampleBundle") {
    val folder = file("src/main/assets/bundle")
    onlyIf { !folder.exists() && System.getenv("PATH").split(File.pathSeparator).any { File(it, "edgespec").canExecute() } }
    commandLine(
        "edgespec", "export", "builtin:shakespeare-73m", "--quick", "--method", "speculative", "--draft", "builtin:shakespeare-draft",
        "--operators", "native", "-o", folder.path,
    )
}
tasks.named("preBuild") { dependsOn(example) }
