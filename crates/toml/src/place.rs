//! Positions in a text, for messages.

/// Line and column, from 1 and in characters, of a byte of the text.
pub(crate) fn line_column(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |n| n + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_from_one_and_in_characters() {
        let text = "a\nbü = c\n";
        assert_eq!((line_column(text, 0), line_column(text, 2), line_column(text, 6)), ((1, 1), (2, 1), (2, 4)));
        assert_eq!(line_column(text, 99), (3, 1), "behind the end");
    }
}
