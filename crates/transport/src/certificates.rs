//! The certificates of a program: its own, with the private key, and those of the authorities that it believes, with what these
//! have revoked.
//!
//! A certificate says which role its holder has by a URI among its alternative names: `impresario:role/client`,
//! `impresario:role/admin` or `impresario:role/server`, exactly one of them. Host names in it do not matter: a cluster's
//! authority decides who belongs to it, and a client checks by name that it speaks with the server that it wants.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::units::show_seconds;
use impresario_config::{Config, Tls};
use impresario_wire::KeyRole;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError,
    RootCertStore, ServerConfig, SignatureScheme,
};
use webpki::KeyUsage;

use crate::keyring::{open_first, roles_that_do};
use crate::revocation::Lists;
use crate::secret_file::{FILE_MAX_BYTES, KeyError, read_public, read_secret};
use crate::watched::Watched;

/// What the name of a role begins with in a certificate.
const ROLE_PREFIX: &str = "impresario:role/";
/// The application protocol that both sides name: a certificate's holder cannot be led to speak with another service.
const PROTOCOL: &[u8] = b"impresario";
/// How often a certificate of a connected peer is looked at again, if the authorities have not changed.
const VERIFY_EVERY: Duration = Duration::from_secs(30);
/// What to do about a file that is missing.
const MISSING: &str =
    "make certificates as SECURITY.md says under \"Certificates\", or correct [tls] in the configuration";
/// What to do about a private key that others may have read.
const REPLACE: &str = "make a new key and certificate";

/// A program's certificates, read again when their files change. While changed files cannot be read or do not fit together,
/// those from before stay in use.
pub struct Certificates {
    files: Arc<Files>,
    loaded: Watched<Loaded>,
}

/// Names for messages.
#[derive(Debug)]
pub(crate) struct Files {
    ca: PathBuf,
    certificate: PathBuf,
    private_key: PathBuf,
    revoked: Option<PathBuf>,
}

/// What was read from the files.
pub(crate) struct Loaded {
    authority: Arc<Authority>,
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

impl Certificates {
    /// The certificates of a program of a cluster in this role. One that needs no more than a client's rights may use another role's if
    /// its own are missing; the error is about its own.
    pub fn of(config: &Config, role: KeyRole) -> Result<Certificates, KeyError> {
        let tls = config.tls.clone().unwrap_or_default();
        open_first(role, |of| Certificates::open(&tls, of, role))
    }

    /// With the files of the role `of`, for a program in `role`.
    fn open(tls: &Tls, of: KeyRole, role: KeyRole) -> Result<Certificates, KeyError> {
        let (certificate, private_key) = (tls.certificate_of(of.name()), tls.private_key_of(of.name()));
        let files = Arc::new(Files { ca: tls.ca.clone(), certificate, private_key, revoked: tls.revoked.clone() });
        let read = files.clone();
        let mut watched = vec![files.certificate.clone(), files.private_key.clone(), files.ca.clone()];
        watched.extend(files.revoked.clone());
        Ok(Certificates { files, loaded: Watched::open(watched, move || Loaded::read(&read, role))? })
    }

    /// The file of the certificate.
    pub fn file(&self) -> &Path {
        &self.files.certificate
    }

    /// Checks the files now and reads them again if they changed. True if they were read.
    pub fn refresh(&self) -> bool {
        self.loaded.refresh()
    }

    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.files
    }

    pub(crate) fn get(&self) -> Arc<Loaded> {
        self.loaded.get()
    }

    /// Whether a client that is connected would still be welcome; the error says why not. Cheap unless something changed.
    pub fn check(&self, peer: &PeerCertificate) -> Result<(), String> {
        let loaded = self.loaded.get();
        let mut verified = peer.verified.lock();
        if Arc::ptr_eq(&verified.0, &loaded.authority) && verified.1.elapsed() < VERIFY_EVERY {
            return Ok(());
        }
        let found = loaded.authority.admit(Use::Client, &peer.chain, UnixTime::now());
        found.map_err(|error| self.files.explain(&error, "the client"))?;
        *verified = (loaded.authority.clone(), Instant::now());
        Ok(())
    }

    /// What is kept of a peer whose certificates the hand-shake has verified; the error explains why it has no role.
    pub(crate) fn peer(
        &self,
        loaded: &Loaded,
        chain: Option<&[CertificateDer<'_>]>,
    ) -> Result<PeerCertificate, String> {
        let chain: Vec<_> = chain.unwrap_or_default().iter().map(|one| one.clone().into_owned()).collect();
        let role = chain.first().ok_or(Error::NoCertificatesPresented).and_then(role_of);
        let role = role.map_err(|error| self.files.explain(&error, "the peer"))?;
        Ok(PeerCertificate { role, chain, verified: Mutex::new((loaded.authority.clone(), Instant::now())) })
    }
}

/// The certificate of a connected client, with those between it and the authority.
pub struct PeerCertificate {
    pub(crate) role: KeyRole,
    chain: Vec<CertificateDer<'static>>,
    /// By which authorities, and when.
    verified: Mutex<(Arc<Authority>, Instant)>,
}

impl fmt::Debug for PeerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerCertificate").field("role", &self.role).finish_non_exhaustive()
    }
}

impl Loaded {
    fn read(files: &Files, role: KeyRole) -> Result<Loaded, KeyError> {
        let fail = |file: &Path, reason: String| KeyError { file: file.into(), reason, is_missing: false };
        let authorities = read_certificates(&files.ca)?;
        let chain = read_certificates(&files.certificate)?;
        let key = read_secret(&files.private_key, MISSING, REPLACE)?;
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|_| {
            fail(&files.private_key, "holds no private key in PEM that is without a password; write one there".into())
        })?;
        let mut roots = RootCertStore::empty();
        for one in authorities {
            let why = |error| format!("holds a certificate that cannot be one of an authority ({error}); replace it");
            roots.add(one).map_err(|error| fail(&files.ca, why(error)))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let revoked = files.revoked.as_deref().map_or(Ok(Lists::default()), |file| Lists::read(file, &roots))?;
        let authority = Authority::new(roots, revoked, provider.clone()).map_err(|why| fail(&files.ca, why))?;
        let own = |error: Error| fail(&files.certificate, files.explain_own(&error));
        let found = authority.verify(Use::Client, &chain, UnixTime::now()).map_err(own)?;
        if found == KeyRole::Server {
            authority.verify(Use::Server, &chain, UnixTime::now()).map_err(own)?;
        }
        // It must not keep the list from counting for others. They refuse this one.
        match (authority.check_revoked(Use::Client, &chain, UnixTime::now()), &files.revoked) {
            (Err(error @ Error::InvalidCertificate(CertificateError::Revoked)), _) => {
                let (file, why) = (files.certificate.display(), files.explain_own(&error));
                tracing::error!(%file, "the program's own certificate {why}");
            }
            (Err(error), Some(file)) => return Err(fail(file, files.explain_own(&error))),
            _ => {}
        }
        if !roles_that_do(role).contains(&found) {
            let why =
                format!("is a certificate for the role {found}, and this program needs one for {role}: correct [tls]");
            return Err(fail(&files.certificate, why));
        }
        let unfit = |error: Error| match error {
            Error::InconsistentKeys(_) => {
                let shown = files.certificate.display();
                fail(&files.private_key, format!("does not belong to the certificate in {shown}; copy both again"))
            }
            other => fail(&files.private_key, format!("cannot be used ({other}); use an EC or RSA key")),
        };
        let protocols = vec![PROTOCOL.to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unfit)?
            .dangerous()
            .with_custom_certificate_verifier(authority.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(unfit)?;
        // Each connection proves itself anew, so that a certificate that is taken away does not live on in a ticket.
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        client.alpn_protocols.clone_from(&protocols);
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unfit)?
            .with_client_cert_verifier(authority.clone())
            .with_single_cert(chain, key)
            .map_err(unfit)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.alpn_protocols = protocols;
        Ok(Loaded { authority, client: Arc::new(client), server: Arc::new(server) })
    }
}

pub(crate) fn read_certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, KeyError> {
    let fail = |reason: String| KeyError { file: file.into(), reason, is_missing: false };
    let bytes = read_public(file, MISSING, FILE_MAX_BYTES)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if found.is_empty() => Err(fail("holds no certificate in PEM; write one there".into())),
        Ok(found) => Ok(found),
        Err(error) => Err(fail(format!("is damaged ({error}); copy it again"))),
    }
}

/// On which side the holder of a certificate is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    Client,
    Server,
}

/// Who decides whether a certificate is good, for both sides.
#[derive(Debug)]
pub(crate) struct Authority {
    roots: Arc<RootCertStore>,
    revoked: Lists,
    clients: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
}

/// Why a certificate that is good otherwise is of no use here.
#[derive(Clone, Debug, thiserror::Error)]
enum Unfit {
    #[error(
        "names no role; make it with the URI {ROLE_PREFIX}client, {ROLE_PREFIX}admin or {ROLE_PREFIX}server among its alternative names"
    )]
    NoRole,
    #[error("names several roles; make it with one")]
    Roles,
    #[error("is for the role {0}, and servers have the role server")]
    NoServer(KeyRole),
}

impl From<Unfit> for Error {
    fn from(unfit: Unfit) -> Error {
        CertificateError::Other(OtherError(Arc::new(unfit))).into()
    }
}

impl Authority {
    fn new(roots: RootCertStore, revoked: Lists, provider: Arc<CryptoProvider>) -> Result<Arc<Authority>, String> {
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let clients = clients.map_err(|error| format!("cannot be used ({error}); replace it"))?;
        Ok(Arc::new(Authority { roots, revoked, clients, provider }))
    }

    /// The role of the first certificate, if the chain leads to an authority, is valid now, and may be used so.
    fn verify(&self, used: Use, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<KeyRole, Error> {
        let (own, between) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        match used {
            Use::Client => self.clients.verify_client_cert(own, between, now).map(drop)?,
            Use::Server => {
                let (parsed, algorithms) = (ParsedCertificate::try_from(own)?, self.algorithms().all);
                verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, between, now, algorithms)?;
            }
        }
        match (role_of(own)?, used) {
            (role @ (KeyRole::Client | KeyRole::Admin), Use::Server) => Err(Unfit::NoServer(role).into()),
            (role, _) => Ok(role),
        }
    }

    /// The same of a certificate that is not revoked either.
    fn admit(&self, used: Use, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<KeyRole, Error> {
        let role = self.verify(used, chain, now)?;
        self.check_revoked(used, chain, now)?;
        Ok(role)
    }

    fn check_revoked(&self, used: Use, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), Error> {
        let usage = match used {
            Use::Client => KeyUsage::client_auth(),
            Use::Server => KeyUsage::server_auth(),
        };
        self.revoked.check(chain, &self.roots, &self.algorithms(), usage, now)
    }

    fn algorithms(&self) -> rustls::crypto::WebPkiSupportedAlgorithms {
        self.provider.signature_verification_algorithms
    }

    fn verify_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms())
    }
}

/// The role that a certificate names.
pub(crate) fn role_of(certificate: &CertificateDer<'_>) -> Result<KeyRole, Error> {
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|_| CertificateError::BadEncoding)?;
    let mut named = parsed.valid_uri_names().filter_map(|uri| uri.strip_prefix(ROLE_PREFIX));
    let role = named.next().and_then(|name| KeyRole::ALL.into_iter().find(|role| role.name() == name));
    match (role, named.next()) {
        (Some(role), None) => Ok(role),
        (None, None) => Err(Unfit::NoRole.into()),
        _ => Err(Unfit::Roles.into()),
    }
}

impl ServerCertVerifier for Authority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let chain = [std::slice::from_ref(end_entity), intermediates].concat();
        self.admit(Use::Server, &chain, now).map(|_| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}

impl ClientCertVerifier for Authority {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let chain = [std::slice::from_ref(end_entity), intermediates].concat();
        self.admit(Use::Client, &chain, now).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}

impl Files {
    /// The file of the certificate, for messages.
    pub(crate) fn certificate(&self) -> std::path::Display<'_> {
        self.certificate.display()
    }

    /// What is wrong with the program's own certificate.
    fn explain_own(&self, error: &Error) -> String {
        match error {
            Error::InvalidCertificate(why) => self.explain_certificate(why),
            other => format!("cannot be used: {other}"),
        }
    }

    fn explain_certificate(&self, why: &CertificateError) -> String {
        let ca = self.ca.display();
        let s = |from: &UnixTime, to: &UnixTime| show_seconds(to.as_secs().saturating_sub(from.as_secs()) as f64);
        match why {
            CertificateError::ExpiredContext { time, not_after } => {
                format!("expired {} ago; replace it, or set the clock that is wrong", s(not_after, time))
            }
            CertificateError::NotValidYetContext { time, not_before } => {
                format!("is not valid for another {}; set the clock that is wrong", s(time, not_before))
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                "was issued by no authority in {ca}: it is of another cluster, or that file is; correct [tls] or copy \
                 the present files"
            ),
            CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => "may not be used so: \
                 leave its extended key usage out, or make it with clientAuth, and with serverAuth too for servers"
                .into(),
            CertificateError::Revoked => {
                let list = self.revoked.as_deref().unwrap_or(Path::new("")).display();
                format!("was revoked, as {list} says; replace it")
            }
            CertificateError::Other(why) => match why.0.downcast_ref() {
                Some(webpki::Error::UnsupportedCertVersion) => "is of an older version of X.509 than 3, which has no \
                     place for a role; make it with the file of extensions in SECURITY.md (`-extfile`)"
                    .into(),
                _ => why.0.to_string(),
            },
            other => format!("cannot be used: {other}"),
        }
    }

    /// Why a hand-shake or a connection failed, with the remedy. `peer` is who is at the other end.
    pub(crate) fn explain(&self, error: &Error, peer: &str) -> String {
        let own = self.certificate.display();
        match error {
            Error::InvalidCertificate(why) => format!("the certificate of {peer} {}", self.explain_certificate(why)),
            Error::NoCertificatesPresented => format!("{peer} has shown no certificate; give it one"),
            Error::AlertReceived(alert) => {
                let why = match alert {
                    AlertDescription::CertificateExpired => {
                        "as it has expired, or is not valid yet: replace it, or set the clock that is wrong"
                    }
                    AlertDescription::CertificateRevoked => "as it was revoked: replace it",
                    AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                        "as it knows no authority that has issued it: it is of another cluster, or was replaced; copy \
                         the present files of [tls]"
                    }
                    AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
                        "as it names no role that may do this: see \"Certificates\" in SECURITY.md"
                    }
                    AlertDescription::CertificateRequired => "as none was shown: correct [tls]",
                    AlertDescription::NoApplicationProtocol => "as it is no server of Impresario: correct the address",
                    _ => return format!("{peer} has ended the TLS connection: {alert:?}; see its log"),
                };
                format!("{peer} has refused the certificate in {own}, {why}")
            }
            Error::InvalidMessage(_)
            | Error::InappropriateMessage { .. }
            | Error::InappropriateHandshakeMessage { .. } => {
                format!("{peer} does not speak TLS 1.3 as it should ({error})")
            }
            Error::PeerIncompatible(why) => format!("{peer} does not speak TLS 1.3 ({why:?})"),
            other => format!("the TLS connection with {peer} failed: {other}"),
        }
    }
}
