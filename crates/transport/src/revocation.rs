//! Lists of revoked certificates, as their authorities issue them.

use std::path::Path;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::{CertificateError, Error, RootCertStore};
use webpki::{
    CertRevocationList, EndEntityCert, KeyUsage, OwnedCertRevocationList, RevocationOptionsBuilder, UnknownStatusPolicy,
};

use crate::secret_file::{KeyError, read_public};

/// Maximum length of a file of lists, bytes: tens of thousands of certificates.
const FILE_MAX_BYTES: u64 = 4 << 20;
const MISSING: &str =
    "write the list of the authority there, as SECURITY.md says under \"Certificates\", or remove `revoked` from [tls]";

/// The lists in a file, one of each authority.
#[derive(Debug, Default)]
pub(crate) struct Lists(Vec<List>);

#[derive(Debug)]
struct List {
    list: CertRevocationList<'static>,
    /// Several authorities have the name of its issuer: by which of them it is, its signature tells.
    is_of_several: bool,
}

fn fail(file: &Path, reason: String) -> KeyError {
    KeyError { file: file.into(), reason, is_missing: false }
}

/// The lists in a file, whoever has signed them.
fn read(file: &Path) -> Result<Vec<CertRevocationList<'static>>, KeyError> {
    let bytes = read_public(file, MISSING, FILE_MAX_BYTES)?;
    let mut lists = Vec::new();
    for found in CertificateRevocationListDer::pem_slice_iter(&bytes) {
        let found = found.map_err(|error| fail(file, format!("is damaged ({error}); copy it again")))?;
        let list = OwnedCertRevocationList::from_der(&found).map_err(|error| {
            fail(file, format!("holds a list that cannot be used ({error}); write complete lists of version 2"))
        })?;
        lists.push(CertRevocationList::from(list));
    }
    if lists.is_empty() {
        return Err(fail(file, "holds no list of revoked certificates in PEM (X509 CRL); write one there".into()));
    }
    Ok(lists)
}

/// Whether a list in the file names a certificate. Who has signed it is not looked at.
pub(crate) fn names(file: &Path, certificate: &EndEntityCert<'_>) -> Result<bool, KeyError> {
    let names = |list: &CertRevocationList<'_>| {
        list.issuer() == certificate.issuer() && matches!(list.find_serial(certificate.serial()), Ok(Some(_)))
    };
    Ok(read(file)?.iter().any(names))
}

impl Lists {
    /// Reads the file, whose lists are those of these authorities or of others below them.
    pub(crate) fn read(file: &Path, roots: &RootCertStore) -> Result<Lists, KeyError> {
        let mut lists: Vec<List> = Vec::new();
        for list in read(file)? {
            let named = roots.roots.iter().filter(|root| root.subject.as_ref() == list.issuer()).count();
            if named == 0 {
                tracing::warn!(
                    file = %file.display(),
                    "a list of revoked certificates is of none of the authorities; it counts for what its issuer has issued below them"
                );
            }
            let is_of_several = named > 1;
            if !is_of_several && lists.iter().any(|other| other.list.issuer() == list.issuer()) {
                return Err(fail(file, "holds two lists of one authority; keep the later".into()));
            }
            lists.push(List { list, is_of_several });
        }
        Ok(Lists(lists))
    }

    /// Refuses a chain that is good otherwise if one of its certificates is revoked.
    pub(crate) fn check(
        &self,
        chain: &[CertificateDer<'_>],
        roots: &RootCertStore,
        algorithms: &rustls::crypto::WebPkiSupportedAlgorithms,
        usage: KeyUsage,
        now: UnixTime,
    ) -> Result<(), Error> {
        let Some((own, between)) = chain.split_first().filter(|_| !self.0.is_empty()) else { return Ok(()) };
        let own = EndEntityCert::try_from(own).map_err(|_| CertificateError::BadEncoding)?;
        for List { list, is_of_several } in &self.0 {
            // One that is past its next update counts: what it revokes stays revoked.
            let lists = [list];
            let options = RevocationOptionsBuilder::new(&lists)
                .map_err(|_| Error::General("no list of revoked certificates".into()))?
                .with_status_policy(UnknownStatusPolicy::Allow)
                .build();
            let verified = own.verify_for_usage(algorithms.all, &roots.roots, between, now, usage, Some(options), None);
            match verified {
                Ok(_) => {}
                Err(webpki::Error::CertRevoked) => return Err(CertificateError::Revoked.into()),
                // Of another authority of that name, which the list or the certificate is not of: the chain is good.
                Err(webpki::Error::InvalidCrlSignatureForPublicKey | webpki::Error::InvalidSignatureForPublicKey)
                    if *is_of_several => {}
                Err(error) => {
                    return Err(Error::General(format!("a list of revoked certificates is of no use: {error}")));
                }
            }
        }
        Ok(())
    }
}
