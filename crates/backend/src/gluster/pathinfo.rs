//! Which bricks a file is on, as GlusterFS tells it: nested lists with `<POSIX(/brick):host:/brick/path>` for each brick
//! in the extended attribute `trusted.glusterfs.pathinfo`.

use std::ffi::CStr;

use impresario_base::siphash::siphash;

/// The attribute.
pub(crate) const NAME: &CStr = c"trusted.glusterfs.pathinfo";

/// The bricks that are told, as `host:/brick`, in their order.
pub(crate) fn bricks(value: &[u8]) -> Vec<String> {
    let Ok(text) = std::str::from_utf8(value) else { return Vec::new() };
    let brick = |part: &str| {
        let (folder, rest) = part.split_once("):")?;
        let (host, _) = rest.split_once(':')?;
        Some(format!("{host}:{folder}"))
    };
    text.split("<POSIX(").skip(1).filter_map(brick).collect()
}

/// A number that every I/O node gives a brick of which only the name is known.
pub(crate) fn number(brick: &str) -> u32 {
    siphash(&[0; 16], brick.as_bytes()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bricks_are_told_in_their_order() {
        let of = |text: &str| bricks(text.as_bytes());
        assert_eq!(of("(<DISTRIBUTE:vol-dht> <POSIX(/bricks/1):node1:/bricks/1/dir/file>)"), ["node1:/bricks/1"]);
        let replicas =
            "(<DISTRIBUTE:v-dht> (<REPLICATE:v-r> <POSIX(/bricks/1):node1:/bricks/1/f> <POSIX(/b):n2:/b/f>))";
        assert_eq!(of(replicas), ["node1:/bricks/1", "n2:/b"]);
        assert!(of("nothing").is_empty() && of("<POSIX(").is_empty() && of("<POSIX(a):b").is_empty());
        assert!(bricks(b"<POSIX(/\xff):h:/f>").is_empty());
        assert_ne!(number("node1:/bricks/1"), number("node1:/bricks/2"));
    }
}
