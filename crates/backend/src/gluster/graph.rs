//! The text that describes a volume: translators, each with its kind, its options and those below it.

/// Kinds of translators that keep bytes, names or opens to themselves for a while. A server that forwards for many clients
/// must pass these: a write that it has answered is with a brick, and what another client changed is seen.
/// Each with the option that switches it off, and its value.
const CACHES: [(&str, &str, &str); 10] = [
    ("write-behind", "pass-through", "true"),
    ("open-behind", "pass-through", "true"),
    // Else who has no right to a file reads it: the brick, which looks, is not asked.
    ("open-behind", "lazy-open", "no"),
    ("quick-read", "max-file-size", "0"),
    ("io-cache", "pass-through", "true"),
    ("read-ahead", "pass-through", "true"),
    ("readdir-ahead", "pass-through", "true"),
    ("md-cache", "pass-through", "true"),
    ("nl-cache", "pass-through", "true"),
    ("stat-prefetch", "pass-through", "true"),
];
const SHARD: &str = "features/shard";

/// The caches of a volume, which are switched off when it is opened.
pub(super) enum Caches {
    /// By the names that `glusterd` gives them.
    Usual,
    /// By their names in a volume file, each with its kind.
    Named(Vec<(String, String)>),
}

impl Caches {
    /// What switches them off: translator (with `*` for any volume), option, value.
    pub(super) fn off(&self) -> Vec<(String, &'static str, &'static str)> {
        match self {
            Caches::Usual => CACHES.iter().map(|(kind, key, value)| (format!("*-{kind}"), *key, *value)).collect(),
            Caches::Named(caches) => {
                let off = |(name, kind): &(String, String)| -> Vec<_> {
                    let options = CACHES.iter().filter(|(cache, ..)| kind == *cache);
                    options.map(|(_, key, value)| (name.clone(), *key, *value)).collect()
                };
                caches.iter().flat_map(off).collect()
            }
        }
    }

    /// Those of a volume file.
    pub(super) fn of(text: &str) -> Caches {
        let caches = translators(text).into_iter().filter_map(|translator| {
            let kind = translator.kind.strip_prefix("performance/")?;
            CACHES.iter().any(|(cache, ..)| kind == *cache).then(|| (translator.name.clone(), kind.into()))
        });
        Caches::Named(caches.collect())
    }
}

struct Translator {
    name: String,
    kind: String,
    below: Vec<String>,
    /// Its lines, with the first and the last.
    lines: Vec<String>,
}

fn translators(text: &str) -> Vec<Translator> {
    let (mut all, mut open) = (Vec::new(), None::<Translator>);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next(), words.next());
        match (first, &mut open) {
            (Some("volume"), _) => {
                let name = second.unwrap_or_default().to_string();
                open = Some(Translator { name, kind: String::new(), below: Vec::new(), lines: vec![line.into()] });
            }
            (Some(first), Some(translator)) => {
                translator.lines.push(line.into());
                match first {
                    "type" => translator.kind = second.unwrap_or_default().into(),
                    "subvolumes" => translator.below = second.into_iter().chain(words).map(Into::into).collect(),
                    "end-volume" => all.extend(open.take()),
                    _ => {}
                }
            }
            _ => {}
        }
    }
    all
}

/// The same volume with its files as bricks see them, in shards; `None` where files are not in shards.
pub(super) fn without_shards(text: &str) -> Option<String> {
    let all = translators(text);
    let shard = all.iter().find(|translator| translator.kind == SHARD)?;
    let below = shard.below.first()?;
    let mut plain = String::new();
    for translator in all.iter().filter(|translator| translator.kind != SHARD) {
        for line in &translator.lines {
            if line.trim_start().starts_with("subvolumes") {
                let names = translator.below.iter().map(|name| if *name == shard.name { below } else { name });
                plain += &format!("    subvolumes {}\n", names.cloned().collect::<Vec<_>>().join(" "));
            } else {
                plain += &format!("{line}\n");
            }
        }
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\nvolume c0\n type protocol/client\n option x y\nend-volume\nvolume c1\n    type \
                        protocol/client\nend-volume\n\nvolume d\n type cluster/distribute\n subvolumes c0 c1\n\
                        end-volume\nvolume s\n type features/shard\n subvolumes d\nend-volume\nvolume late\n type \
                        performance/write-behind\n subvolumes s\nend-volume\nvolume top\n type debug/io-stats\n \
                        subvolumes late\nend-volume\n";

    #[test]
    fn shards_are_left_out() {
        let plain = without_shards(TEXT).unwrap();
        assert!(!plain.contains("shard") && plain.contains("option x y"), "{plain}");
        let all = translators(&plain);
        let below: Vec<_> = all.iter().map(|t| (t.name.as_str(), t.below.join(","))).collect();
        let expected = [("c0", ""), ("c1", ""), ("d", "c0,c1"), ("late", "d"), ("top", "late")];
        assert_eq!(below, expected.map(|(name, below)| (name, below.to_string())));
        assert_eq!(without_shards(&plain), None);
        assert_eq!(without_shards("volume"), None);
    }

    #[test]
    fn caches_are_found_by_their_kind() {
        assert_eq!(Caches::of(TEXT).off(), [("late".into(), "pass-through", "true")]);
        let opens = TEXT.replace("write-behind", "open-behind");
        assert_eq!(Caches::of(&opens).off().len(), 2);
        assert!(Caches::Usual.off().contains(&("*-quick-read".into(), "max-file-size", "0")));
    }
}
