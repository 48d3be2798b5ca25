//! Striping as an extended attribute: `user.impresario.layout`, read on files, set on directories.
//!
//! Its value is `pcount=2,ssize=65536,base=0`. When setting, any of the three may be left out (the default of the
//! parent or the cluster then applies), and `ssize` may be written `64k` or `1m`.

use impresario_base::units::parse_bytes;
use impresario_layout::Layout;
use impresario_wire::LayoutRequest;

/// The attribute's name.
pub(crate) const NAME: &str = "user.impresario.layout";

/// Longest value read, bytes.
const VALUE_MAX_BYTES: usize = 256;

/// A file's striping as the attribute's value.
pub(crate) fn show(layout: &Layout) -> String {
    format!("pcount={},ssize={},base={}", layout.pcount, layout.ssize_bytes, layout.base)
}

/// Parses the attribute's value; the error says what is wrong with it.
pub(crate) fn parse(value: &[u8]) -> Result<LayoutRequest, String> {
    const REMEDY: &str = "write it like pcount=2,ssize=64k,base=0";
    if value.len() > VALUE_MAX_BYTES {
        return Err(format!("{NAME} of {} bytes is too long; {REMEDY}", value.len()));
    }
    let text = std::str::from_utf8(value).map_err(|_| format!("{NAME} is not text; {REMEDY}"))?;
    let text = text.trim_end_matches(['\0', '\n']).trim();
    let mut request = LayoutRequest::default();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, number) = part.split_once('=').ok_or_else(|| format!("`{part}` in {NAME} has no `=`; {REMEDY}"))?;
        let bad = |what: &str| format!("{key} `{number}` in {NAME} is not {what}; {REMEDY}");
        match key.trim() {
            "base" => request.base = Some(number.trim().parse().map_err(|_| bad("a server's index"))?),
            "pcount" => request.pcount = Some(number.trim().parse().map_err(|_| bad("a number of servers"))?),
            "ssize" => {
                request.ssize_bytes = Some(
                    parse_bytes(number).ok().and_then(|n| n.try_into().ok()).ok_or_else(|| bad("a size in bytes"))?,
                )
            }
            other => return Err(format!("`{other}` in {NAME} is unknown; {REMEDY}")),
        }
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_set() {
        let layout = Layout::new(1, 2, 65536, 4).unwrap();
        assert_eq!(show(&layout), "pcount=2,ssize=65536,base=1");
        let request = parse(show(&layout).as_bytes()).unwrap();
        assert_eq!(request, LayoutRequest { base: Some(1), pcount: Some(2), ssize_bytes: Some(65536) });
    }

    #[test]
    fn parts_may_be_left_out_and_sizes_have_units() {
        assert_eq!(parse(b"ssize=1m").unwrap(), LayoutRequest { ssize_bytes: Some(1 << 20), ..Default::default() });
        assert_eq!(parse(b" pcount = 3 , ssize=64k\n").unwrap().ssize_bytes, Some(65536));
        assert_eq!(parse(b"").unwrap(), LayoutRequest::default());
    }

    #[test]
    fn complaints_name_the_part_and_the_remedy() {
        for (value, part) in [
            ("pcount", "`pcount`"),
            ("pcount=-1", "pcount `-1`"),
            ("base=70000", "base `70000`"),
            ("ssize=9999m", "ssize `9999m`"),
            ("ssize=m", "ssize `m`"),
            ("stripe=4", "`stripe`"),
        ] {
            let complaint = parse(value.as_bytes()).unwrap_err();
            assert!(complaint.contains(part) && complaint.contains("pcount=2,ssize=64k"), "{complaint}");
        }
        assert!(parse(&[0xff, 0xfe]).is_err());
        assert!(parse(&[b'1'; 300]).is_err());
    }
}
