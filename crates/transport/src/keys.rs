//! The keys of a program, and the files that hold them.
//!
//! A cluster's keys are made in *generations*, each with a number. A generation has a key pair whose private half only
//! servers have (every file has the public half, so that a program can tell a server from another client) and a secret
//! for each role. A file holds what one role may know of the current generation and, during a rotation, of the previous
//! one:
//!
//! | file | public half | private half | secret of clients | of administrators | of servers |
//! |---|---|---|---|---|---|
//! | `client.key` | yes | | yes | | |
//! | `admin.key` | yes | | | yes | |
//! | `server.key` | yes | yes | yes | yes | yes |

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::machine::{random_bytes, random_number};
use impresario_base::replace::replace;
use impresario_wire::KeyRole;
use serde::{Deserialize, Serialize};

use crate::secret_file::{KeyError, read_secret};

/// Length of a secret and of both halves of a key pair, bytes.
pub(crate) const SECRET_BYTES: usize = 32;
/// Maximum generations in a file.
pub(crate) const GENERATIONS_MAX: usize = 3;

/// 32 secret bytes, never displayed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) [u8; SECRET_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // Do not repeat the text: it may be a mistyped secret.
        let wrong = || serde::de::Error::custom("a key has 64 hexadecimal digits");
        if text.len() != 2 * SECRET_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut bytes = [0; SECRET_BYTES];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Secret(bytes))
    }
}

/// The keys of one generation, as far as the file holds them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// Its number, random, 16 hexadecimal digits.
    pub number: String,
    /// Servers accept it until then, seconds since 1970 on their clocks; absent: until it is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_s: Option<u64>,
    pub(crate) public: Secret,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) private: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    client: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    admin: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    server: Option<Secret>,
}

impl Generation {
    /// Generates new keys.
    pub fn draw() -> io::Result<Generation> {
        let pair = crate::noise::key_pair()?;
        Ok(Generation {
            number: format!("{:016x}", random_number()?),
            until_s: None,
            public: pair.1,
            private: Some(pair.0),
            client: Some(draw_secret()?),
            admin: Some(draw_secret()?),
            server: Some(draw_secret()?),
        })
    }

    /// Its number as on the wire.
    pub(crate) fn id(&self) -> u64 {
        u64::from_str_radix(&self.number, 16).unwrap_or(0)
    }

    /// The secret of a role, if the file holds it.
    pub(crate) fn secret(&self, role: KeyRole) -> Option<&Secret> {
        match role {
            KeyRole::Client => self.client.as_ref(),
            KeyRole::Admin => self.admin.as_ref(),
            KeyRole::Server => self.server.as_ref(),
        }
    }

    /// True while servers accept it, by this machine's clock.
    pub fn is_accepted(&self) -> bool {
        self.until_s.is_none_or(|until_s| now_s() < until_s)
    }

    /// What a role may know of it.
    fn for_role(&self, role: KeyRole) -> Generation {
        let keep =
            |secret: &Option<Secret>, of: KeyRole| secret.clone().filter(|_| role == of || role == KeyRole::Server);
        Generation {
            private: self.private.clone().filter(|_| role == KeyRole::Server),
            client: keep(&self.client, KeyRole::Client),
            admin: keep(&self.admin, KeyRole::Admin),
            server: keep(&self.server, KeyRole::Server),
            ..self.clone()
        }
    }
}

fn draw_secret() -> io::Result<Secret> {
    random_bytes().map(Secret)
}

/// Seconds since 1970.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// The content of a key file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    role: String,
    /// Current generation first.
    #[serde(rename = "key")]
    pub generations: Vec<Generation>,
}

impl Keys {
    /// Generates all keys of a new cluster.
    pub fn draw() -> io::Result<Keys> {
        Ok(Keys { role: KeyRole::Server.name().into(), generations: vec![Generation::draw()?] })
    }

    /// Adds a new generation; servers accept the current one for `keep` longer, and older ones for as long as before, where
    /// the file has room for them. With a `keep` of zero only the new one is left.
    pub fn rotated(&self, keep: Duration) -> io::Result<Keys> {
        let mut generations = vec![Generation::draw()?];
        if let Some((present, older)) = self.generations.split_first().filter(|_| !keep.is_zero()) {
            generations.push(Generation { until_s: Some(now_s().saturating_add(keep.as_secs())), ..present.clone() });
            generations.extend(older.iter().filter(|generation| generation.is_accepted()).cloned());
            generations.truncate(GENERATIONS_MAX);
        }
        Ok(Keys { role: self.role.clone(), generations })
    }

    /// The role that the file is for.
    pub fn role(&self) -> KeyRole {
        KeyRole::ALL.into_iter().find(|role| role.name() == self.role).unwrap_or(KeyRole::Client)
    }

    /// What a role may know of them.
    pub fn for_role(&self, role: KeyRole) -> Keys {
        let generations = self.generations.iter().map(|generation| generation.for_role(role)).collect();
        Keys { role: role.name().into(), generations }
    }

    /// The generation with this number.
    pub(crate) fn generation(&self, id: u64) -> Option<&Generation> {
        self.generations.iter().find(|generation| generation.id() == id)
    }

    /// Reads a key file. Refused if others may read it, or if it belongs neither to this user nor to root.
    pub fn load(file: &Path) -> Result<Keys, KeyError> {
        let fail = |reason: String| KeyError { file: file.into(), reason, is_missing: false };
        let bytes = read_secret(
            file,
            "make keys with `impresario key new`, or copy the file from where they were made",
            "`impresario key rotate`",
        )?;
        let text = String::from_utf8(bytes).map_err(|_| fail("is no text; copy the file again".into()))?;
        let keys: Keys = impresario_toml::parse_text(&text)
            .map_err(|why| fail(format!("{why}; copy the file again from where the keys were made")))?;
        keys.check().map_err(fail)?;
        Ok(keys)
    }

    fn check(&self) -> Result<(), String> {
        let role = KeyRole::ALL
            .into_iter()
            .find(|role| role.name() == self.role)
            .ok_or_else(|| format!("the role {:?} does not exist; it is client, admin or server", self.role))?;
        if self.generations.is_empty() || self.generations.len() > GENERATIONS_MAX {
            return Err(format!("it holds {} keys; it must hold 1 to {GENERATIONS_MAX}", self.generations.len()));
        }
        for generation in &self.generations {
            let number = &generation.number;
            if number.len() != 16 || generation.id() == 0 {
                return Err(format!("{number:?} is not the number of a key, which has 16 hexadecimal digits"));
            }
            let wanted: &[KeyRole] = if role == KeyRole::Server { &KeyRole::ALL } else { &[role] };
            if let Some(missing) = wanted.iter().find(|role| generation.secret(**role).is_none()) {
                return Err(format!("key {number} has no secret of role {missing}; copy the whole file"));
            }
            if role == KeyRole::Server && generation.private.is_none() {
                return Err(format!("key {number} has no private half; copy the whole file"));
            }
        }
        Ok(())
    }

    /// Writes the file with mode 0600, replacing an existing one. Creates the folder, with mode 0700, if missing.
    pub fn store(&self, file: &Path) -> Result<(), KeyError> {
        let fail = |what: &str, error: io::Error| KeyError {
            file: file.into(),
            reason: format!("{what}: {error}"),
            is_missing: false,
        };
        if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
            use std::os::unix::fs::DirBuilderExt;
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|error| fail("its folder cannot be made", error))?;
        }
        let text = format!(
            "# Keys of an Impresario cluster, for the role {}. Keep them secret: mode 0600.\n{}",
            self.role,
            toml::to_string(self).map_err(|error| fail("cannot be written", io::Error::other(error)))?
        );
        replace(file, 0o600, text.as_bytes()).map_err(|error| fail("cannot be written", error))
    }
}

/// The name of a role's key file.
pub fn key_file_name(role: KeyRole) -> String {
    format!("{role}.key")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_holds_what_its_role_may_know() {
        let dir = tempfile::tempdir().unwrap();
        let all = Keys::draw().unwrap();
        for role in KeyRole::ALL {
            let file = dir.path().join("keys").join(key_file_name(role));
            all.for_role(role).store(&file).unwrap();
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            let read = Keys::load(&file).unwrap();
            assert_eq!((&read, read.role()), (&all.for_role(role), role));
            let generation = &read.generations[0];
            let holds: Vec<bool> = KeyRole::ALL.iter().map(|role| generation.secret(*role).is_some()).collect();
            let expected = match role {
                KeyRole::Client => [true, false, false],
                KeyRole::Admin => [false, true, false],
                KeyRole::Server => [true; 3],
            };
            assert_eq!((holds.as_slice(), generation.private.is_some()), (&expected[..], role == KeyRole::Server));
            assert!(!format!("{read:?}").contains(&"a".repeat(8)) && format!("{read:?}").contains("(secret)"));
        }
    }

    #[test]
    fn a_file_that_others_may_use_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("client.key");
        Keys::draw().unwrap().for_role(KeyRole::Client).store(&file).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o601] {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = Keys::load(&file).unwrap_err().to_string();
            assert!(error.contains("chmod 0600") && error.contains(&format!("{mode:04o}")), "{error}");
        }
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o400)).unwrap();
        Keys::load(&file).unwrap();
    }

    #[test]
    fn bad_files_are_explained_without_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.key");
        let missing = Keys::load(&file).unwrap_err();
        assert!(missing.is_missing && missing.to_string().contains("impresario key new"));
        assert!(Keys::load(dir.path()).unwrap_err().to_string().contains("not a file"));
        let client = toml::to_string(&Keys::draw().unwrap().for_role(KeyRole::Client)).unwrap();
        let public = client.split("public = \"").nth(1).unwrap().split('"').next().unwrap().to_string();
        for (text, what) in [
            ("nonsense".to_string(), "line 1"),
            (client.replace("role = \"client\"", "role = \"server\""), "no secret of role admin"),
            (client.replace("role = \"client\"", "role = \"king\""), "does not exist"),
            (client.replace(&public, &public[1..]), "64 hexadecimal digits"),
            (client.replace("number = \"", "number = \"x"), "16 hexadecimal digits"),
            ("role = \"client\"\nkey = []\n".into(), "1 to 3"),
            ("#".repeat(70_000), "bytes"),
        ] {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
            let error = Keys::load(&file).unwrap_err().to_string();
            assert!(error.contains(what) && !error.contains(&public[1..]), "{what}: {error}");
        }
    }

    #[test]
    fn a_rotation_keeps_the_present_generation_for_a_while() {
        let first = Keys::draw().unwrap();
        let second = first.rotated(Duration::from_secs(3600)).unwrap();
        assert_eq!(second.generations[1].number, first.generations[0].number);
        assert!(second.generations[1].is_accepted() && second.generations[0].until_s.is_none());
        let third = second.rotated(Duration::from_secs(3600)).unwrap();
        assert_eq!(third.generations[1].number, second.generations[0].number);
        assert_eq!(third.generations[2..], second.generations[1..], "accepted for as long as was said");
        third.check().unwrap();
        let fourth = third.rotated(Duration::from_secs(3600)).unwrap();
        assert_eq!(fourth.generations[2].number, third.generations[1].number, "the oldest goes");
        fourth.check().unwrap();
        assert_eq!(third.rotated(Duration::ZERO).unwrap().generations.len(), 1);
        let mut ended = second.clone();
        ended.generations[1].until_s = Some(1);
        assert_eq!(ended.rotated(Duration::from_secs(3600)).unwrap().generations.len(), 2, "whose time is over goes");
        assert!(!Generation { until_s: Some(1), ..first.generations[0].clone() }.is_accepted());
    }
}
