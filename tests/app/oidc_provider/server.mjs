// A certified OpenID provider at which everybody is Ada: tests/app/test_real_provider.py starts it.
// Arguments: port, certificate, key, redirect_uri, the file with the client's secret.
import fs from 'node:fs';
import https from 'node:https';
import Provider from 'oidc-provider';

const [port, certificate, key, redirect, secret] = process.argv.slice(2);

const issuer = `https://localhost:${port}`;
const account = (sub) => ({
  accountId: sub,
  claims: async () => ({ sub, orgs: { acme: ['PROVIDER_ADMIN'] } }),
});
const provider = new Provider(issuer, {
  clients: [{
    client_id: 'rack-map',
    client_secret: fs.readFileSync(secret, 'utf8').trim(),
    redirect_uris: [redirect],
    response_types: ['code'],
    grant_types: ['authorization_code'],
  }],
  pkce: { required: () => true },
  conformIdTokenClaims: false,
  claims: { openid: ['sub', 'orgs'] },
  features: { devInteractions: { enabled: false } },
  findAccount: (_, sub) => account(sub),
  interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
});

const answer = provider.callback();
https.createServer({ cert: fs.readFileSync(certificate), key: fs.readFileSync(key) }, async (req, res) => {
  if (!req.url.startsWith('/interaction/')) return answer(req, res);
  const { prompt, params, session } = await provider.interactionDetails(req, res);
  if (prompt.name === 'login') return provider.interactionFinished(req, res, { login: { accountId: 'ada' } });
  const grant = new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
  grant.addOIDCScope(params.scope);
  return provider.interactionFinished(req, res, { consent: { grantId: await grant.save() } });
}).listen(Number(port), '127.0.0.1', () => console.log('ready'));
