//! The subset of libconfig's syntax that AGIOS configurations use: groups, integers, text, booleans, comments.

use std::fmt;

/// A value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// `{ … }`
    Group(Vec<(String, Setting)>),
    /// Decimal or `0x…`, with or without `L`.
    Int(i64),
    /// `"…"`; adjacent strings are joined.
    Text(String),
    /// `true` or `false` in any case.
    Bool(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Group(_) => f.write_str("{…}"),
            Value::Int(n) => n.fmt(f),
            Value::Text(text) => write!(f, "\"{text}\""),
            Value::Bool(b) => b.fmt(f),
        }
    }
}

/// A value and its position.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The value.
    pub value: Value,
    /// Line of its name, from 1.
    pub line: usize,
}

/// Largest nesting depth of groups.
const DEPTH_MAX: usize = 16;

/// The line of an error, and its message.
type Wrong = (usize, String);

/// The settings of a file in order; the last of several with one name counts.
pub fn parse(text: &str) -> Result<Vec<(String, Setting)>, Wrong> {
    let mut reader = Reader { rest: text, line: 1 };
    reader.group(0)
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn wrong<T>(&self, what: impl Into<String>) -> Result<T, Wrong> {
        Err((self.line, what.into()))
    }

    fn skip(&mut self, bytes: usize) {
        let (gone, rest) = self.rest.split_at(bytes);
        self.line += gone.bytes().filter(|b| *b == b'\n').count();
        self.rest = rest;
    }

    /// Skips blanks and comments.
    fn blanks(&mut self) -> Result<(), Wrong> {
        loop {
            let blanks = self.rest.len() - self.rest.trim_start().len();
            self.skip(blanks);
            if self.rest.starts_with('#') || self.rest.starts_with("//") {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.skip(end);
            } else if self.rest.starts_with("/*") {
                let Some(end) = self.rest.find("*/") else { return self.wrong("a comment /* is not closed") };
                self.skip(end + 2);
            } else {
                return Ok(());
            }
        }
    }

    fn eat(&mut self, what: &[char]) -> Result<bool, Wrong> {
        self.blanks()?;
        let there = self.rest.starts_with(what);
        if there {
            self.skip(1);
        }
        Ok(there)
    }

    fn word(&mut self, part: impl Fn(char) -> bool) -> String {
        let end = self.rest.find(|c| !part(c)).unwrap_or(self.rest.len());
        let word = self.rest[..end].to_string();
        self.skip(end);
        word
    }

    fn shown(&self) -> String {
        self.rest.chars().take_while(|c| !c.is_whitespace()).take(20).collect()
    }

    /// Settings up to the closing brace, or the end of the file.
    fn group(&mut self, depth: usize) -> Result<Vec<(String, Setting)>, Wrong> {
        let mut settings = Vec::new();
        loop {
            self.blanks()?;
            if self.rest.is_empty() {
                return if depth == 0 { Ok(settings) } else { self.wrong("a group { is not closed") };
            }
            if depth > 0 && self.eat(&['}'])? {
                return Ok(settings);
            }
            let line = self.line;
            let name = self.word(|c| c.is_ascii_alphanumeric() || "-_*".contains(c));
            if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '*') {
                return self.wrong(format!("expected a name, not \"{name}{}\"", self.shown()));
            }
            if !self.eat(&['=', ':'])? {
                return self.wrong(format!("after {name}, = is expected, not \"{}\"", self.shown()));
            }
            let value = self.value(&name, depth)?;
            settings.push((name, Setting { value, line }));
            self.eat(&[';', ','])?;
        }
    }

    fn value(&mut self, name: &str, depth: usize) -> Result<Value, Wrong> {
        self.blanks()?;
        if self.rest.starts_with('"') {
            let mut text = String::new();
            while self.rest.starts_with('"') {
                text += &self.text()?;
                self.blanks()?;
            }
            return Ok(Value::Text(text));
        }
        if self.eat(&['{'])? {
            if depth >= DEPTH_MAX {
                return self.wrong(format!("{name}: groups are nested deeper than {DEPTH_MAX}"));
            }
            return self.group(depth + 1).map(Value::Group);
        }
        let shown = self.shown();
        let word = self.word(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        match word.to_ascii_lowercase().as_str() {
            "true" => return Ok(Value::Bool(true)),
            "false" => return Ok(Value::Bool(false)),
            _ => {}
        }
        let digits = word.trim_end_matches(['L', 'l']);
        let number = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
            Some(hex) => i64::from_str_radix(hex, 16).ok(),
            None => digits.parse().ok(),
        };
        match number {
            Some(number) => Ok(Value::Int(number)),
            None => self.wrong(format!("{name} = {shown}: a whole number, \"text\", true, false or {{ is expected")),
        }
    }

    fn text(&mut self) -> Result<String, Wrong> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.skip(at + 1);
                    return Ok(text);
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, c @ ('\\' | '"'))) => text.push(c),
                    _ => return self.wrong("the only escape sequences are \\n, \\t, \\\\ and \\\""),
                },
                '\n' => break,
                c => text.push(c),
            }
        }
        self.wrong("text is not closed with \" in its line")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syntax_of_shipped_configurations_is_read() {
        let text = "# a comment\nlibrary_options:\n{\n  trace = false ; // one\n  /* two\n lines */\n  \
                    prefix = \"/tmp/\" \"x\\\"y\"\n  waiting_time=900000\n  big = 0x10L, neg = -1\n};\nlast = TRUE";
        let settings = parse(text).unwrap();
        assert_eq!(settings.len(), 2);
        let Value::Group(keys) = &settings[0].1.value else { panic!("{settings:?}") };
        let at = |name: &str| keys.iter().find(|(n, _)| n == name).map(|(_, s)| (s.value.clone(), s.line)).unwrap();
        assert_eq!(at("trace"), (Value::Bool(false), 4));
        assert_eq!(at("prefix"), (Value::Text("/tmp/x\"y".into()), 7));
        assert_eq!(at("waiting_time"), (Value::Int(900_000), 8));
        assert_eq!((at("big").0, at("neg").0), (Value::Int(16), Value::Int(-1)));
        assert_eq!(settings[1].1, Setting { value: Value::Bool(true), line: 11 });
    }

    #[test]
    fn mistakes_have_their_line() {
        for (text, line, wants) in [
            ("a = 1\nb 2", 2, "= is expected"),
            ("a = {\n b = 1", 2, "not closed"),
            ("a = \"x\n\"", 1, "not closed"),
            ("/* x", 1, "not closed"),
            ("a = 1.5", 1, "whole number"),
            ("a = (1, 2)", 1, "whole number"),
            ("a = 99999999999999999999", 1, "whole number"),
            ("= 3", 1, "a name"),
            ("a = \"\\q\"", 1, "\\n"),
            ("}", 1, "a name"),
        ] {
            let (at, what) = parse(text).unwrap_err();
            assert!(at == line && what.contains(wants), "{text}: {at}: {what}");
        }
        assert!(parse(&"a={".repeat(1000)).unwrap_err().1.contains("deeper"));
    }
}
