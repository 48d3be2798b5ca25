//! The parent of a split request, which is answered once.

/// Counts the parts of a split request.
#[derive(Debug)]
pub struct Parent {
    left: u32,
    errno: i32,
    bytes: u64,
}

impl Parent {
    /// A parent of `parts` parts, at least 1.
    pub fn new(parts: u32) -> Parent {
        Parent { left: parts.max(1), errno: 0, bytes: 0 }
    }

    /// One part ended. The last one returns the answer: the first error (0: none) and the bytes of all parts.
    pub fn part_done(&mut self, errno: i32, bytes: u64) -> Option<(i32, u64)> {
        if self.left == 0 {
            return None; // already answered
        }
        if self.errno == 0 {
            self.errno = errno;
        }
        self.bytes += bytes;
        self.left -= 1;
        (self.left == 0).then_some((self.errno, self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_brings_the_answer_once() {
        let mut p = Parent::new(3);
        assert_eq!(p.part_done(0, 10), None);
        assert_eq!(p.part_done(5, 0), None);
        assert_eq!(p.part_done(28, 7), Some((5, 17)), "the first error wins");
        assert_eq!(p.part_done(0, 1), None);
    }
}
