//! QUIC by `quinn`: one stream in each direction, messages of known length. Everything on one thread, datagrams as long as the link takes,
//! windows that never close, the kernel's segmentation as `quinn` chooses by itself.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Connection, Endpoint, RecvStream, SendStream, ServerConfig, TransportConfig, VarInt,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tokio::runtime::{Builder, Runtime};

use super::{Arrival, End, SILENCE, read_number, write_number};

/// Name in the certificate; nobody looks at it.
const NAME: &str = "lm-bench";
/// Headers of a datagram over IPv4.
const HEADERS_LEN: u32 = 28;
/// Bytes that may be on their way: far more than any link here holds.
const WINDOW: u32 = 64 << 20;

/// One connection.
pub(crate) struct Quic {
    runtime: Runtime,
    endpoint: Endpoint,
    connection: Connection,
    sending: SendStream,
    receiving: RecvStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    ending: bool,
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

fn transport(mtu: u32) -> TransportConfig {
    let datagram = mtu.saturating_sub(HEADERS_LEN).clamp(1200, 65_507) as u16;
    let mut transport = TransportConfig::default();
    transport
        .initial_mtu(datagram)
        .min_mtu(datagram)
        .mtu_discovery_config(None)
        .stream_receive_window(VarInt::from_u32(WINDOW))
        .receive_window(VarInt::from_u32(WINDOW))
        .send_window(u64::from(WINDOW))
        .max_idle_timeout(None);
    transport
}

impl Quic {
    /// Connects to an address, or waits there for who connects, over a link of this MTU in bytes. An [`End`] has messages of `len` bytes.
    pub(crate) fn open(
        near: bool,
        address: SocketAddrV4,
        mtu: u32,
        len: usize,
        ready: impl FnOnce(),
    ) -> io::Result<Quic> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let transport = Arc::new(transport(mtu));
        let _inside = runtime.enter();
        let (endpoint, connection) = if near {
            let mut endpoint = Endpoint::client(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
            let mut config = client(provider)?;
            config.transport_config(transport);
            endpoint.set_default_client_config(config);
            let connecting = endpoint.connect(SocketAddr::V4(address), NAME).map_err(other)?;
            (endpoint, runtime.block_on(connecting).map_err(other)?)
        } else {
            let mut config = server(provider)?;
            config.transport_config(transport);
            let endpoint = Endpoint::server(config, SocketAddr::V4(address))?;
            ready();
            let connection = runtime.block_on(async {
                let incoming = endpoint.accept().await;
                let incoming = incoming.ok_or_else(|| io::Error::other("the socket was closed"))?;
                incoming.await.map_err(other)
            })?;
            (endpoint, connection)
        };
        // A stream begins to exist for the other side with its first byte.
        let (sending, receiving) = runtime.block_on(async {
            if near {
                let (mut sending, receiving) = connection.open_bi().await?;
                sending.write_all(&[0]).await.map_err(other)?;
                Ok::<_, io::Error>((sending, receiving))
            } else {
                let (sending, mut receiving) = connection.accept_bi().await?;
                receiving.read_exact(&mut [0]).await.map_err(other)?;
                Ok((sending, receiving))
            }
        })?;
        Ok(Quic {
            endpoint,
            connection,
            sending,
            receiving,
            outgoing: vec![0x5a; len],
            incoming: vec![0; len],
            ending: false,
            runtime,
        })
    }
}

impl End for Quic {
    fn send(&mut self, _: usize, number: u64) -> io::Result<()> {
        write_number(&mut self.outgoing, number);
        let written = self.runtime.block_on(self.sending.write_all(&self.outgoing));
        written.map_err(other)
    }

    fn receive(&mut self) -> io::Result<Option<Arrival>> {
        let reading = self.receiving.read_exact(&mut self.incoming);
        let read = if self.ending {
            let limited = async { tokio::time::timeout(SILENCE, reading).await };
            match self.runtime.block_on(limited) {
                Ok(read) => read,
                Err(_silence) => return Ok(None),
            }
        } else {
            self.runtime.block_on(reading)
        };
        match read {
            Ok(()) => Ok(Some(Arrival {
                from: 0,
                number: read_number(&self.incoming),
                bytes: self.incoming.len(),
                whole: true,
            })),
            Err(quinn::ReadExactError::FinishedEarly(_)) => Ok(None),
            Err(quinn::ReadExactError::ReadError(_)) if self.ending => Ok(None),
            Err(error) => Err(other(error)),
        }
    }

    fn end_soon(&mut self) -> io::Result<()> {
        self.ending = true;
        Ok(())
    }

    fn copied_bytes(&self) -> Option<u64> {
        None
    }

    fn wait_until(&mut self, time: Instant) {
        let time = tokio::time::Instant::from_std(time);
        self.runtime
            .block_on(async { tokio::time::sleep_until(time).await });
    }
}

impl Drop for Quic {
    /// What was written last has to arrive.
    fn drop(&mut self) {
        // It has ended when the other side says so, or has gone.
        let _gone = self.sending.finish();
        let stopped = self.sending.stopped();
        let limited = async { tokio::time::timeout(Duration::from_millis(500), stopped).await };
        let _late = self.runtime.block_on(limited);
        self.connection.close(VarInt::from_u32(0), b"");
        let idle =
            async { tokio::time::timeout(Duration::from_millis(100), self.endpoint.wait_idle()).await };
        let _late = self.runtime.block_on(idle);
    }
}

impl Read for Quic {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.runtime.block_on(self.receiving.read(bytes));
        Ok(read.map_err(other)?.unwrap_or(0))
    }
}

impl Write for Quic {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.runtime.block_on(async {
            let written = self.sending.write(bytes).await;
            // The thread is the connection's, too: now it sends.
            tokio::task::yield_now().await;
            written.map_err(other)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn server(provider: Arc<CryptoProvider>) -> io::Result<ServerConfig> {
    let certified = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]).map_err(other)?;
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(other)?
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key.into())
        .map_err(other)?;
    let crypto = QuicServerConfig::try_from(tls).map_err(other)?;
    Ok(ServerConfig::with_crypto(Arc::new(crypto)))
}

fn client(provider: Arc<CryptoProvider>) -> io::Result<ClientConfig> {
    let verifier = Arc::new(Anybody(Arc::clone(&provider)));
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(other)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let crypto = QuicClientConfig::try_from(tls).map_err(other)?;
    Ok(ClientConfig::new(Arc::new(crypto)))
}

/// Believes every certificate: what travels is filling, and what is measured comes after the handshake.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("QUIC has TLS 1.3".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
