// An app over the archive of tools/make_aar.py, in a repository of artifacts or in Maven's local one.  Gradle was never run here;
// the tests compile the activity against the archive's classes (tests/android/test_aar.py).
plugins {
    id("com.android.application") version "8.13.0"
    kotlin("android") version "2.4.21"
}

android {
    namespace = "dev.edgespec.example"
    compileSdk = 36
    defaultConfig {
        minSdk = 26
        targetSdk = 36
    }
    sourceSets["main"].kotlin.srcDirs("src")
}

dependencies {
    implementation("dev.edgespec:edgespec-android:0.1.0")
}
