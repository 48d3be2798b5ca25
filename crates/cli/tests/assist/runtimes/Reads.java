import java.io.InputStream;
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.MappedByteBuffer;
import java.nio.channels.AsynchronousFileChannel;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** Reads pieces of files in Java's ways, each from the file of its name in a folder, and prints a checksum of each. */
class Reads {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        int piece = Integer.parseInt(arguments[1]);
        long stride = Long.parseLong(arguments[2]);
        int count = Integer.parseInt(arguments[3]);
        for (String way : arguments[4].split(",")) {
            System.out.println(way + " " + Long.toHexString(sum(way, folder.resolve(way), piece, stride, count)));
        }
    }

    static long sum(String way, Path path, int piece, long stride, int count) throws Exception {
        ByteBuffer direct = ByteBuffer.allocateDirect(piece);
        ByteBuffer heap = ByteBuffer.allocate(piece);
        byte[] bytes = new byte[piece];
        long sum = 0;
        switch (way) {
            case "channel":
                try (FileChannel channel = FileChannel.open(path, StandardOpenOption.READ)) {
                    for (long i = 0; i < count; i++) {
                        channel.read(direct.clear(), i * stride);
                        sum = add(sum, direct.flip());
                    }
                }
                break;
            case "position":
                try (FileChannel channel = FileChannel.open(path, StandardOpenOption.READ)) {
                    for (long i = 0; i < count; i++) {
                        channel.position(i * stride).read(heap.clear());
                        sum = add(sum, heap.flip());
                    }
                }
                break;
            case "random":
                try (RandomAccessFile file = new RandomAccessFile(path.toFile(), "r")) {
                    for (long i = 0; i < count; i++) {
                        file.seek(i * stride);
                        file.readFully(bytes);
                        sum = add(sum, ByteBuffer.wrap(bytes));
                    }
                }
                break;
            case "stream":
                try (InputStream stream = Files.newInputStream(path)) {
                    for (long i = 0; i < count; i++) {
                        stream.readNBytes(bytes, 0, piece);
                        sum = add(sum, ByteBuffer.wrap(bytes));
                        stream.skipNBytes(stride - piece);
                    }
                }
                break;
            case "asynchronous":
                try (AsynchronousFileChannel channel = AsynchronousFileChannel.open(path, StandardOpenOption.READ)) {
                    for (long i = 0; i < count; i++) {
                        channel.read(direct.clear(), i * stride).get();
                        sum = add(sum, direct.flip());
                    }
                }
                break;
            case "map":
                try (FileChannel channel = FileChannel.open(path, StandardOpenOption.READ)) {
                    MappedByteBuffer map = channel.map(FileChannel.MapMode.READ_ONLY, 0, count * stride);
                    for (long i = 0; i < count; i++) {
                        map.get((int) (i * stride), bytes);
                        sum = add(sum, ByteBuffer.wrap(bytes));
                    }
                }
                break;
            default:
                throw new IllegalArgumentException(way);
        }
        return sum;
    }

    static long add(long sum, ByteBuffer bytes) {
        while (bytes.hasRemaining()) {
            sum = sum * 31 + bytes.get();
        }
        return sum;
    }
}
