//! Where servers are found: the addresses in the configuration file, looked up again when a server is not where it was.
//!
//! A data server may move to another address while its clients work. Who loses it, or cannot reach it, looks whether the
//! configuration file has changed, and goes on with the addresses that it has then. A file that cannot be read, or has
//! mistakes, changes nothing: it may be half written.

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_config::{Config, FileSeen};

/// The file is looked at no more often than this.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The addresses of a cluster's servers; shared by all links of a client.
#[derive(Clone, Debug)]
pub struct Whereabouts(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    /// `None`: the file was not looked at yet.
    looked: Option<Instant>,
    /// What could not be used, and was told of.
    refused: FileSeen,
    config: Arc<Config>,
}

impl Whereabouts {
    /// As this configuration says, until the file changes that it was read from.
    pub fn of(config: &Config) -> Whereabouts {
        let config = Arc::new(config.clone());
        Whereabouts(Arc::new(Mutex::new(Known { looked: None, refused: FileSeen::default(), config })))
    }

    /// The newest configuration that is known.
    pub fn config(&self) -> Arc<Config> {
        self.0.lock().config.clone()
    }

    /// The addresses of a server, after a look at the file if that is due.
    pub fn addresses(&self, name: &str) -> Vec<String> {
        self.look();
        self.config().addresses(name)
    }

    /// Reads the file if it has changed, and was not looked at just now.
    pub fn look(&self) {
        // Held while the file is read: who comes meanwhile waits for what it says.
        let mut known = self.0.lock();
        let now = Instant::now();
        if known.looked.is_some_and(|looked| now.duration_since(looked) < LOOK_EVERY) {
            return;
        }
        known.looked = Some(now);
        let file = &known.config.cluster.file;
        if !file.has_changed() {
            return;
        }
        let seen = FileSeen::now(file.path());
        match Config::load(file.path()) {
            Ok(config) => {
                tracing::info!(file = %file.path().display(), "the configuration has changed; its addresses are used");
                known.config = Arc::new(config);
            }
            Err(error) if known.refused != seen => {
                tracing::warn!(%error, "the configuration has changed, but cannot be used; the one before is");
                known.refused = seen;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_config::{Data, Meta, MovesTo};

    #[test]
    fn a_changed_file_is_read_and_a_broken_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("impresario.toml");
        let meta = Meta { address: "127.0.0.1:7000".into(), dir: "meta".into(), ..Meta::default() };
        let mut config =
            Config { meta, data: vec![Data::new("data.0", "127.0.0.1:7100", "data.0")], ..Config::default() };
        let program = Whereabouts::of(&config);
        assert_eq!(program.addresses("data.0"), ["127.0.0.1:7100"], "there is no file");
        std::fs::write(&file, config.to_toml()).unwrap();
        let whereabouts = Whereabouts::of(&Config::load(&file).unwrap());
        let again = || {
            whereabouts.0.lock().looked = None;
            whereabouts.addresses("data.0")
        };
        assert_eq!(again(), ["127.0.0.1:7100"]);
        let mut other = Config::load(&file).unwrap();
        other.data[0].address = "127.0.0.1:1".into();
        assert_eq!(
            Whereabouts::of(&other).addresses("data.0"),
            ["127.0.0.1:1"],
            "what a program set counts until then"
        );
        config.data[0].moves_to = Some(MovesTo { address: "127.0.0.1:7101".into(), dir: "other".into() });
        std::fs::write(&file, config.to_toml()).unwrap();
        assert_eq!(again(), ["127.0.0.1:7100", "127.0.0.1:7101"]);
        std::fs::write(&file, "[cluster\n").unwrap();
        assert_eq!(again().len(), 2);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(again().len(), 2);
        config.data[0] = Data::new("data.0", "127.0.0.1:7101", "other");
        std::fs::write(&file, config.to_toml()).unwrap();
        assert_eq!(again(), ["127.0.0.1:7101"]);
        assert!(whereabouts.addresses("data.9").is_empty());
    }
}
