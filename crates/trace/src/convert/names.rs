//! Paths in texts that separate fields by spaces and have no quotes: bytes that would break a line, and `%` itself, are
//! written as `%` and two hexadecimal digits.

/// The path as one word.
pub fn escape(path: &[u8]) -> String {
    let mut out = String::with_capacity(path.len());
    let plain = |b: &u8| b.is_ascii_graphic() && *b != b'%';
    for b in path {
        if plain(b) {
            out.push(*b as char);
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

/// The path of a word. Only what [`escape`] would write is unescaped, so that other programs' names stay as they are.
pub fn unescape(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(word.len());
    let mut at = 0;
    while at < word.len() {
        let code = word.get(at..at + 3).filter(|w| w[0] == b'%').and_then(|w| {
            let hex = |b: u8| (b.is_ascii_digit() || (b'A'..=b'F').contains(&b)).then(|| (b as char).to_digit(16))?;
            let byte = (hex(w[1])? * 16 + hex(w[2])?) as u8;
            (!byte.is_ascii_graphic() || byte == b'%').then_some(byte)
        });
        match code {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(word[at]);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names() {
        assert_eq!(escape(b"/a b%\n\xff"), "/a%20b%25%0A%FF");
        assert_eq!(unescape(b"/a%41%2f%zz%2"), b"/a%41%2f%zz%2", "what we would not have written stays");
    }

    proptest! {
        #[test]
        fn any_path_comes_back(path in prop::collection::vec(any::<u8>(), 0..40)) {
            let word = escape(&path);
            prop_assert!(!word.contains(char::is_whitespace));
            prop_assert_eq!(unescape(word.as_bytes()), path);
        }
    }
}
