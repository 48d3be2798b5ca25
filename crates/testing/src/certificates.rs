//! Certificates for tests: an authority of a cluster, and what it issues.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod, KeyPair,
    RevokedCertParams, SanType, SerialNumber,
};

/// A day.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// An authority with a key of its own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    /// The certificates that it has issued, in PEM; the number of each is its place.
    issued: Mutex<Vec<String>>,
}

/// What a certificate says.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The URIs of its holder.
    pub uris: Vec<String>,
    /// When it begins and ends to be valid.
    pub valid: (SystemTime, SystemTime),
}

impl Wish {
    /// For a role, valid for a day.
    pub fn role(role: &str) -> Wish {
        let now = SystemTime::now();
        Wish { uris: vec![format!("impresario:role/{role}")], valid: (now - DAY, now + DAY) }
    }
}

impl Authority {
    /// A new one.
    ///
    /// # Panics
    /// When no key can be made.
    pub fn draw(name: &str) -> Authority {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Authority { issuer: Issuer::new(params, key), pem, issued: Mutex::default() }
    }

    /// Its certificate, in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate and its private key, in PEM.
    ///
    /// # Panics
    /// When the wish is none that a certificate can express.
    pub fn issue(&self, wish: &Wish) -> (String, String) {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, "a program");
        let uris = wish.uris.iter().map(|uri| SanType::URI(uri.as_str().try_into().expect("plain text")));
        params.subject_alt_names = uris.collect();
        (params.not_before, params.not_after) = (wish.valid.0.into(), wish.valid.1.into());
        let key = KeyPair::generate().expect("a key");
        let mut issued = self.issued.lock().expect("no other test has failed here");
        params.serial_number = Some(number_of(issued.len()));
        let pem = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        issued.push(pem.clone());
        (pem, key.serialize_pem())
    }

    /// The list of what it has revoked, in PEM: these certificates, each in PEM. The next one comes after `next`.
    ///
    /// # Panics
    /// When it has not issued one of them.
    pub fn revoke(&self, revoked: &[&str], next: Duration) -> String {
        let issued = self.issued.lock().expect("no other test has failed here");
        let now = SystemTime::now();
        let number = |pem: &&str| number_of(issued.iter().position(|one| one == pem).expect("one of its own"));
        let revoked = revoked.iter().map(|pem| RevokedCertParams {
            serial_number: number(pem),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: (now - DAY).into(),
            next_update: (now + next).into(),
            crl_number: number_of(0),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).and_then(|list| list.pem()).expect("a list")
    }

    /// Writes `NAME.pem` and `NAME.key`, each in one step.
    ///
    /// # Panics
    /// When they cannot be written.
    pub fn write(&self, folder: &Path, name: &str, wish: &Wish) {
        let (certificate, key) = self.issue(wish);
        replace(&folder.join(format!("{name}.key")), &key);
        replace(&folder.join(format!("{name}.pem")), &certificate);
    }

    /// Writes `ca.pem` and the files of all roles into a folder, which is made if it is missing.
    ///
    /// # Panics
    /// When they cannot be written.
    pub fn write_all(&self, folder: &Path) {
        fs::create_dir_all(folder).expect("a folder");
        replace(&folder.join("ca.pem"), self.pem());
        ["client", "admin", "server"].iter().for_each(|role| self.write(folder, role, &Wish::role(role)));
    }
}

/// Never 0.
fn number_of(place: usize) -> SerialNumber {
    SerialNumber::from(place as u64 + 1)
}

/// Replaces a file in one step; only its owner may use it.
///
/// # Panics
/// When it cannot be written.
pub fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    let mut to = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new).expect("a file");
    to.write_all(text.as_bytes()).expect("room for a file");
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).expect("a file of ours");
    fs::rename(&new, file).expect("a file");
}
