//! Parses one call as strace prints it: name, arguments, result and duration.

use super::errno;
use crate::convert::lines::{seconds_ns, show};

/// A call.
pub struct Call<'a> {
    pub name: &'a str,
    pub args: Vec<&'a [u8]>,
    pub result: Returned<'a>,
    /// With `-T`.
    pub duration_ns: Option<u64>,
}

/// The result of a call.
pub enum Returned<'a> {
    /// A number, and with `-y` the path of a descriptor.
    Number(i64, Option<&'a [u8]>),
    /// An errno, or 0 if its name is unknown.
    Error(u32),
    /// It did not return, or returned something else.
    Nothing,
}

impl<'a> Call<'a> {
    /// The call of a line.
    pub fn parse(text: &'a [u8]) -> Result<Call<'a>, String> {
        let shown = || show(&String::from_utf8_lossy(text));
        let open = text.iter().position(|b| *b == b'(').ok_or_else(|| format!("{} is not a valid call", shown()))?;
        let name = std::str::from_utf8(&text[..open]).map_err(|_| format!("{} is not a valid call", shown()))?;
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(format!("{} is not a valid call", shown()));
        }
        let (args, after) = arguments(&text[open + 1..]).ok_or_else(|| format!("the call {} does not end", shown()))?;
        let after = after.trim_ascii();
        let Some(result) = after.strip_prefix(b"=") else {
            return Err(format!("{} has no result (= …)", shown()));
        };
        let mut result = result.trim_ascii();
        let mut duration_ns = None;
        // " <0.000012>" at the end. A path in <> follows its number without a space.
        if let Some(at) = result.iter().rposition(|b| *b == b'<').filter(|at| *at > 0 && result[at - 1] == b' ') {
            let time = result[at + 1..].strip_suffix(b">").and_then(|t| std::str::from_utf8(t).ok());
            if let Some(time) = time.and_then(seconds_ns) {
                duration_ns = Some(time);
                result = result[..at].trim_ascii_end();
            }
        }
        Ok(Call { name, args, result: returned(result), duration_ns })
    }

    /// An argument as a number: 12, 0x1f, 010 or 3</path>.
    pub fn number(&self, at: usize) -> Option<i64> {
        number(self.args.get(at)?)
    }

    /// An argument as a descriptor and, with `-y`, its path.
    pub fn descriptor(&self, at: usize) -> Option<(i32, Option<&'a [u8]>)> {
        let arg = self.args.get(at)?;
        let fd = number(arg).and_then(|n| i32::try_from(n).ok())?;
        Some((fd, annotated(arg)))
    }

    /// An argument as a quoted string, without the quotes and escapes.
    pub fn string(&self, at: usize) -> Option<Vec<u8>> {
        let arg = self.args.get(at)?.strip_prefix(b"\"")?;
        let end = closing_quote(arg)?;
        Some(unescape(&arg[..end]))
    }

    /// An argument as written.
    pub fn raw(&self, at: usize) -> &'a [u8] {
        self.args.get(at).copied().unwrap_or_default()
    }

    /// True if some argument contains the word.
    pub fn mentions(&self, word: &str) -> bool {
        self.args.iter().any(|arg| arg.windows(word.len()).any(|w| w == word.as_bytes()))
    }

    /// The sum of all `iov_len=` of an argument.
    pub fn iov_bytes(&self, at: usize) -> u64 {
        let text = String::from_utf8_lossy(self.raw(at));
        let digits = |t: &str| t.bytes().take_while(u8::is_ascii_digit).count();
        let lengths = text.split("iov_len=").skip(1).filter_map(|t| t[..digits(t)].parse::<u64>().ok());
        lengths.fold(0, u64::saturating_add)
    }
}

fn number(arg: &[u8]) -> Option<i64> {
    let (negative, digits) = match arg.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, arg),
    };
    let end = digits.iter().take_while(|b| b.is_ascii_hexdigit() || **b == b'x').count();
    let word = std::str::from_utf8(&digits[..end]).ok()?;
    let value = match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()? as i64,
        None if word.len() > 1 && word.starts_with('0') => i64::from_str_radix(word, 8).ok()?,
        None => word.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// The text in <> after a number or AT_FDCWD.
pub fn annotated(arg: &[u8]) -> Option<&[u8]> {
    let open = arg.iter().position(|b| *b == b'<')?;
    arg[open + 1..].split(|b| *b == b'>').next()
}

fn returned(result: &[u8]) -> Returned<'_> {
    let text = String::from_utf8_lossy(result);
    if let Some(rest) = text.strip_prefix("-1 ") {
        let name = rest.split(' ').next().unwrap_or_default();
        // Restarted calls (ERESTARTSYS) are printed again.
        return if name.starts_with("ERESTART") { Returned::Nothing } else { Returned::Error(errno::number(name)) };
    }
    match number(result) {
        Some(n) => Returned::Number(n, annotated(result)),
        None => Returned::Nothing,
    }
}

/// The arguments up to the closing parenthesis, and what follows it.
fn arguments(text: &[u8]) -> Option<(Vec<&[u8]>, &[u8])> {
    let mut args = Vec::new();
    let (mut depth, mut begin, mut at) = (0u32, 0, 0);
    while at < text.len() {
        match text[at] {
            b'"' => at += 1 + closing_quote(&text[at + 1..])?,
            // A path from -y: after a digit, or after AT_FDCWD.
            b'<' if at > 0 && (text[at - 1].is_ascii_digit() || text[..at].ends_with(b"AT_FDCWD")) => {
                at = closing_angle(text, at)?;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' if depth == 0 => {
                let last = text[begin..at].trim_ascii();
                if !last.is_empty() {
                    args.push(last);
                }
                return Some((args, &text[at + 1..]));
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                args.push(text[begin..at].trim_ascii());
                begin = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Within a path `>` is escaped; within socket addresses it occurs in `->`.
fn closing_angle(text: &[u8], open: usize) -> Option<usize> {
    (open + 1..text.len()).find(|i| text[*i] == b'>' && text[i - 1] != b'-')
}

fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'\\' => at += 2,
            b'"' => return Some(at),
            _ => at += 1,
        }
    }
    None
}

/// Reverses C's escapes.
pub fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        if text[at] != b'\\' || at + 1 == text.len() {
            out.push(text[at]);
            at += 1;
            continue;
        }
        let code = text[at + 1];
        at += 2;
        match code {
            b'n' => out.push(b'\n'),
            b't' => out.push(b'\t'),
            b'r' => out.push(b'\r'),
            b'v' => out.push(0x0b),
            b'f' => out.push(0x0c),
            b'x' => {
                let end = (at + 2).min(text.len());
                let hex = std::str::from_utf8(&text[at..end]).ok().and_then(|t| u8::from_str_radix(t, 16).ok());
                match hex {
                    Some(byte) => {
                        out.push(byte);
                        at = end;
                    }
                    None => out.push(b'x'),
                }
            }
            b'0'..=b'7' => {
                let mut byte = u32::from(code - b'0');
                for _ in 0..2 {
                    match text.get(at) {
                        Some(d @ b'0'..=b'7') => {
                            byte = byte * 8 + u32::from(d - b'0');
                            at += 1;
                        }
                        _ => break,
                    }
                }
                out.push(byte as u8);
            }
            other => out.push(other),
        }
    }
    out
}
