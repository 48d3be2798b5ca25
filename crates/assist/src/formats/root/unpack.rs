//! What ROOT compresses: blocks, each behind a head of nine bytes with its method and both lengths.

use std::io::Read;

use super::super::Fields;

/// What LZ4 makes of a byte at most.
const LZ4_RATIO_MAX: usize = 255;
/// Memory for the dictionary of LZMA, KiB: it grows with what is unpacked, and that of ROOT's highest level is the largest.
const XZ_KIB_MAX: u32 = 80 << 10;

/// All blocks, unpacked to exactly so many bytes, for which memory is taken as they come.
pub(super) fn blocks(packed: &[u8], len: usize) -> Option<Vec<u8>> {
    let (mut fields, mut whole) = (Fields::new(packed), Vec::new());
    while whole.len() < len {
        let method = fields.take(2)?;
        fields.take(1)?;
        let (packed_bytes, bytes) = (fields.little(3)?, fields.little(3)? as usize);
        let block = fields.take(packed_bytes)?;
        if bytes == 0 || bytes > len - whole.len() {
            return None;
        }
        let end = whole.len() + bytes;
        match method {
            b"ZL" => read(flate2::read::ZlibDecoder::new(block), bytes, &mut whole)?,
            b"ZS" => read(ruzstd::decoding::StreamingDecoder::new(block).ok()?, bytes, &mut whole)?,
            b"XZ" => read(lzma_rust2::XzReader::new_mem_limit(block, false, XZ_KIB_MAX), bytes, &mut whole)?,
            // A sum stands before the data.
            b"L4" => lz4(block.get(8..)?, bytes, &mut whole)?,
            _ => return None,
        }
        if whole.len() != end {
            return None;
        }
    }
    Some(whole)
}

fn read(decoder: impl Read, bytes: usize, out: &mut Vec<u8>) -> Option<()> {
    decoder.take(bytes as u64).read_to_end(out).ok().map(drop)
}

fn lz4(block: &[u8], bytes: usize, out: &mut Vec<u8>) -> Option<()> {
    let start = out.len();
    if bytes / LZ4_RATIO_MAX > block.len() {
        return None;
    }
    out.resize(start + bytes, 0);
    let unpacked = lz4_flex::block::decompress_into(block, &mut out[start..]).ok()?;
    (unpacked == bytes).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(method: &[u8; 2], packed: &[u8], len: usize) -> Vec<u8> {
        let wide = |n: usize| n.to_le_bytes()[..3].to_vec();
        [method.to_vec(), vec![1], wide(packed.len()), wide(len), packed.to_vec()].concat()
    }

    /// "abc" a hundred times, packed by liblzma at its highest level, of which the dictionary may have 64 MiB.
    const XZ: &[u8] = b"\xfd7zXZ\0\0\x01i\"\xde6\x02\0!\x01\x1c\0\0\0\x10\xcfX\xcc\xe0\x01+\0\x0b]\x000\x98\x88\xadK\
        6\xed\x1b\xb2\0\0\0\0\x84\xb8\xc4\xd0\0\x01#\xac\x02\0\0\0Y\x19\xb3]>0\x0d\x8b\x02\0\0\0\0\x01YZ";

    #[test]
    fn blocks_of_each_method_follow_one_another() {
        // "abc", then seven bytes that repeat it, then "xyz".
        let lz4 = [&[0; 8][..], b"\x33abc\x03\x00\x50xyzab"].concat();
        let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut zlib, b"0123456789").unwrap();
        let zlib = zlib.finish().unwrap();
        // One raw block of five bytes in a frame of a single segment.
        let zstd = b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello";
        let packed = [block(b"L4", &lz4, 15), block(b"ZL", &zlib, 10), block(b"ZS", zstd, 5), block(b"XZ", XZ, 300)];
        let whole = [&b"abcabcabcaxyzab0123456789hello"[..], &b"abc".repeat(100)].concat();
        let packed = packed.concat();
        assert_eq!(blocks(&packed, 330), Some(whole));
        assert_eq!(blocks(&packed, 331), None, "there is no more");
        assert_eq!(blocks(&packed, 329), None, "a block goes beyond the end");
        assert_eq!(blocks(&block(b"XZ", b"", 5), 5), None);
        assert_eq!(blocks(&block(b"CS", b"hello", 5), 5), None, "a method of old");
        // Longer and shorter than it says, and back to before its beginning.
        assert_eq!(blocks(&block(b"L4", &lz4, 9), 9), None);
        assert_eq!(blocks(&block(b"L4", &lz4, 16), 16), None);
        assert_eq!(blocks(&block(b"L4", &[&[0; 8][..], b"\x13a\x02\x00\x00"].concat(), 8), 8), None);
    }

    /// A block that claims 16 MB, or is a bomb, takes no more than it is allowed.
    #[test]
    fn bombs_cost_nothing() {
        let most = (1 << 24) - 1;
        assert_eq!(blocks(&block(b"L4", &[0; 8 + 100], most), most), None);
        let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut zlib, &vec![0; 8 << 20]).unwrap();
        let zlib = zlib.finish().unwrap();
        let unpacked = blocks(&block(b"ZL", &zlib, 1000), 1000).unwrap();
        assert!(unpacked.len() == 1000 && unpacked.capacity() < 1 << 16);
        // A stream of LZMA whose dictionary would have 4 GiB, and the sum that belongs to that.
        let mut huge = XZ.to_vec();
        huge[16] = 40;
        huge[20..24].copy_from_slice(&0xb311a0e6_u32.to_le_bytes());
        assert_eq!(blocks(&block(b"XZ", &huge, 300), 300), None);
    }
}
