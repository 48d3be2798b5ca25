//! What ROOT compresses: blocks, each behind a head of nine bytes with its method and both lengths.

use std::io::Read;

use super::super::Fields;

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

/// A block of LZ4: bytes taken as they are in turn with repetitions of what came before.
fn lz4(block: &[u8], bytes: usize, out: &mut Vec<u8>) -> Option<()> {
    let (first, mut fields) = (out.len(), Fields::new(block));
    loop {
        let token = fields.little(1)?;
        let plain_bytes = length(&mut fields, token >> 4)?;
        out.extend(fields.take(plain_bytes)?);
        if fields.rest().is_empty() {
            return Some(());
        }
        let back = usize::try_from(fields.little(2)?).ok().filter(|back| *back > 0 && *back <= out.len() - first)?;
        let repeated = usize::try_from(length(&mut fields, token & 15)?.checked_add(4)?).ok()?;
        if repeated > bytes.checked_sub(out.len() - first)? {
            return None;
        }
        // It may repeat what it has just written.
        for _ in 0..repeated {
            out.push(*out.get(out.len() - back)?);
        }
    }
}

/// Four bits, and bytes that add to them as long as they are full.
fn length(fields: &mut Fields<'_>, bits: u64) -> Option<u64> {
    let mut length = bits;
    if bits == 15 {
        loop {
            let more = fields.little(1)?;
            length = length.checked_add(more)?;
            if more < 255 {
                break;
            }
        }
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(method: &[u8; 2], packed: &[u8], len: usize) -> Vec<u8> {
        let wide = |n: usize| n.to_le_bytes()[..3].to_vec();
        [method.to_vec(), vec![1], wide(packed.len()), wide(len), packed.to_vec()].concat()
    }

    #[test]
    fn blocks_of_each_method_follow_one_another() {
        // "abc", then seven bytes that repeat it, then "xyz".
        let lz4 = [&[0; 8][..], b"\x33abc\x03\x00\x30xyz"].concat();
        let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut zlib, b"0123456789").unwrap();
        let zlib = zlib.finish().unwrap();
        // One raw block of five bytes in a frame of a single segment.
        let zstd = b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello";
        let packed = [block(b"L4", &lz4, 13), block(b"ZL", &zlib, 10), block(b"ZS", zstd, 5)].concat();
        assert_eq!(blocks(&packed, 28).as_deref(), Some(&b"abcabcabcaxyz0123456789hello"[..]));
        assert_eq!(blocks(&packed, 29), None, "there is no more");
        assert_eq!(blocks(&packed, 27), None, "a block goes beyond the end");
        assert_eq!(blocks(&block(b"XZ", b"", 5), 5), None);
        // Longer than it says, back to before its beginning, and no end.
        assert_eq!(blocks(&block(b"L4", &lz4, 9), 9), None);
        assert_eq!(blocks(&block(b"L4", &[&[0; 8][..], b"\x13a\x02\x00\x00"].concat(), 8), 8), None);
        assert_eq!(blocks(&block(b"L4", &[&[0; 8][..], b"\x1fa\x01\x00\xff\xff"].concat(), 600), 600), None);
    }
}
