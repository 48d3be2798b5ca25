//! What a certificate says, for people.

use std::path::Path;
use std::time::Duration;

use impresario_wire::KeyRole;
use ring::digest;
use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use crate::KeyError;
use crate::certificates::{read_certificates, role_of};
use crate::revocation::names;

/// What a certificate says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShownCertificate {
    /// The role of its holder; `None` if it names none, as those of authorities, or several.
    pub role: Option<KeyRole>,
    /// The URIs among its alternative names.
    pub uris: Vec<String>,
    /// The SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` shows it.
    pub sha256: String,
    /// Its number with the authority, in hexadecimal digits, as in lists of what is revoked.
    pub serial: String,
    /// When it begins and ends to be valid, seconds since 1970-01-01 UTC.
    pub valid_s: (u64, u64),
    /// A list of its authority names it.
    pub is_revoked: bool,
}

/// The certificates in a file, in PEM; `revoked` is the file of lists of what is revoked, if there is one.
pub fn show_certificates(file: &Path, revoked: Option<&Path>) -> Result<Vec<ShownCertificate>, KeyError> {
    let damaged = |error| KeyError {
        file: file.into(),
        reason: format!("holds a certificate that is damaged ({error}); copy it again"),
        is_missing: false,
    };
    let shown = |one: &CertificateDer<'_>| {
        let parsed = EndEntityCert::try_from(one).map_err(damaged)?;
        let is_revoked = revoked.map_or(Ok(false), |list| names(list, &parsed))?;
        shown(one, &parsed, is_revoked).map_err(damaged)
    };
    read_certificates(file)?.iter().map(shown).collect()
}

fn shown(
    certificate: &CertificateDer<'_>,
    parsed: &EndEntityCert<'_>,
    is_revoked: bool,
) -> Result<ShownCertificate, webpki::Error> {
    let hex = |bytes: &[u8], between: &str| {
        bytes.iter().map(|byte| format!("{byte:02X}")).collect::<Vec<String>>().join(between)
    };
    Ok(ShownCertificate {
        role: role_of(certificate).ok(),
        uris: parsed.valid_uri_names().map(String::from).collect(),
        sha256: hex(digest::digest(&digest::SHA256, certificate).as_ref(), ":"),
        serial: hex(parsed.serial(), ""),
        valid_s: (bound(parsed, 0)?, bound(parsed, u64::MAX)?),
        is_revoked,
    })
}

/// When a certificate begins or ends to be valid: what is wrong with it long before, or after.
fn bound(certificate: &EndEntityCert<'_>, at_s: u64) -> Result<u64, webpki::Error> {
    let at = UnixTime::since_unix_epoch(Duration::from_secs(at_s));
    match certificate.verify_for_usage(&[], &[], &[], at, KeyUsage::client_auth(), None, None) {
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => Ok(not_before.as_secs()),
        Err(webpki::Error::CertExpired { not_after, .. }) => Ok(not_after.as_secs()),
        Err(error) => Err(error),
        Ok(_) => Err(webpki::Error::InvalidCertValidity),
    }
}
