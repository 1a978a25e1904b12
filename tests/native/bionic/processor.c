/* What unidbg does not say of its processor: that it has dot products (HWCAP_ASIMDDP) and runs one thread. */
unsigned long getauxval(unsigned long type) { return type == 16 /* AT_HWCAP */ ? 1ul << 20 : 0; }

unsigned _ZNSt6__ndk16thread20hardware_concurrencyEv(void) { return 1; }
