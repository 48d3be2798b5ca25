import java.io.RandomAccessFile;
import java.nio.ByteBuffer;

/** Reads a file through a channel, every other 64 KiB, and prints a checksum. */
class HeldOut {
    public static void main(String[] arguments) throws Exception {
        long sum = 0;
        try (RandomAccessFile file = new RandomAccessFile(arguments[0], "r")) {
            ByteBuffer buffer = ByteBuffer.allocateDirect(65536);
            for (long at = 0; at < file.length(); at += 131072) {
                buffer.clear();
                int n = file.getChannel().read(buffer, at);
                for (int i = 0; i < n; i += 64) {
                    sum = sum * 31 + buffer.get(i);
                }
            }
        }
        System.out.println(sum);
    }
}
