//! Files of a `tls_dir`, as in Cloud Hypervisor: the authority's certificate, and the own certificate and key.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

const AUTHORITY: &str = "ca-cert.pem";
const CLIENT: (&str, &str) = ("client-cert.pem", "client-key.pem");
const SERVER: (&str, &str) = ("server-cert.pem", "server-key.pem");
/// Limit on the size of a file, in bytes.
const MOST: u64 = 1 << 20;

/// Loads the identity of a source, and the authority of its targets.
///
/// # Errors
///
/// Fails with one line: the folder, the file, and its fault.
pub(crate) fn client(folder: &Path) -> Result<Arc<ClientConfig>, String> {
    let (authority, certificates, key) = read(folder, CLIENT)?;
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_protocol_versions(&[&TLS13]).map_err(|error| wrong(folder, AUTHORITY, error))?;
    let config = builder.with_root_certificates(authority).with_client_auth_cert(certificates, key);
    let mut config = config.map_err(|error| unfit(folder, CLIENT, error))?;
    // Each connection authenticates on its own.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Loads the identity of a target, and the authority of its sources.
///
/// # Errors
///
/// As [`client`].
pub(crate) fn server(folder: &Path) -> Result<Arc<ServerConfig>, String> {
    let (authority, certificates, key) = read(folder, SERVER)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authority), provider()).build();
    let verifier = verifier.map_err(|error| wrong(folder, AUTHORITY, error))?;
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder.with_protocol_versions(&[&TLS13]).map_err(|error| wrong(folder, AUTHORITY, error))?;
    let config = builder.with_client_cert_verifier(verifier).with_single_cert(certificates, key);
    let mut config = config.map_err(|error| unfit(folder, SERVER, error))?;
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

type Read = (RootCertStore, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn read(folder: &Path, (certificate, key): (&str, &str)) -> Result<Read, String> {
    let mut authority = RootCertStore::empty();
    for root in certificates(folder, AUTHORITY)? {
        authority.add(root).map_err(|error| wrong(folder, AUTHORITY, error))?;
    }
    let certificates = certificates(folder, certificate)?;
    let bytes = contents(folder, key)?;
    let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| wrong(folder, key, error))?;
    Ok((authority, certificates, key))
}

fn certificates(folder: &Path, name: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = contents(folder, name)?;
    let all = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let all = all.map_err(|error| wrong(folder, name, error))?;
    if all.is_empty() { Err(wrong(folder, name, "it has no certificate; give one as PEM")) } else { Ok(all) }
}

/// Reads a file. Refuses pipes, which could block.
fn contents(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = rustix::fs::open(folder.join(name), flags, Mode::empty()).map_err(|error| wrong(folder, name, error))?;
    let found = rustix::fs::fstat(&fd).map_err(|error| wrong(folder, name, error))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(wrong(folder, name, "it is no file"));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::from(fd).take(MOST).read_to_end(&mut bytes);
    read.map_err(|error| wrong(folder, name, error))?;
    Ok(bytes)
}

fn wrong(folder: &Path, name: &str, what: impl std::fmt::Display) -> String {
    format!("tls_dir={}: {name}: {what}", folder.display())
}

fn unfit(folder: &Path, (certificate, key): (&str, &str), error: rustls::Error) -> String {
    wrong(folder, certificate, format!("it does not belong to {key}: {error}"))
}
