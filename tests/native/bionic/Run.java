import com.github.unidbg.AndroidEmulator;
import com.github.unidbg.Module;
import com.github.unidbg.arm.backend.DynarmicFactory;
import com.github.unidbg.file.FileResult;
import com.github.unidbg.file.IOResolver;
import com.github.unidbg.file.linux.AndroidFileIO;
import com.github.unidbg.linux.android.AndroidEmulatorBuilder;
import com.github.unidbg.linux.android.AndroidResolver;
import com.github.unidbg.linux.file.SimpleFileIO;
import com.github.unidbg.memory.Memory;
import com.github.unidbg.memory.MemoryBlock;
import java.io.File;

/**
 * Runs a program for Android, linked as a shared library with a {@code main}, on real bionic in an emulated arm64
 * processor: {@code Run FOLDER LIBCXX PROGRAM ARGUMENTS...}. It may read files inside FOLDER. Its threads never run.
 */
public class Run {
  public static void main(String[] words) throws Exception {
    AndroidEmulator emulator =
        AndroidEmulatorBuilder.for64Bit()
            .setProcessName("dev.edgespec")
            .addBackendFactory(new DynarmicFactory(true))
            .build();
    String folder = words[0] + File.separator;
    IOResolver<AndroidFileIO> files =
        (of, path, flags) -> {
          File file = new File(path);
          if (!path.startsWith(folder) || !file.isFile()) return null;
          return FileResult.success(new SimpleFileIO(flags, file, path));
        };
    emulator.getSyscallHandler().addIOResolver(files);
    Memory memory = emulator.getMemory();
    memory.setLibraryResolver(new AndroidResolver(23));
    memory.load(new File(words[1]), true);
    Module program = memory.load(new File(words[2]), true);
    int count = words.length - 2;
    MemoryBlock arguments = memory.malloc(8 * (count + 1), true);
    for (int i = 0; i < count; i++) {
      MemoryBlock word = memory.malloc(words[i + 2].length() + 1, true);
      word.getPointer().setString(0, words[i + 2]);
      arguments.getPointer().setLong(8 * i, word.getPointer().peer);
    }
    Number code = program.findSymbolByName("main", false).call(emulator, count, arguments.getPointer());
    memory.findModule("libc.so").findSymbolByName("fflush", false).call(emulator, 0L);
    System.out.flush();
    Runtime.getRuntime().halt(code.intValue());
  }
}
