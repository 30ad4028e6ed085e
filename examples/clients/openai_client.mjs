// The official JavaScript client: plain, streamed, and with the stream helper.
//
//     npm install openai
//     node openai_client.mjs          // BASE_URL and MODEL are read from the environment

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: (process.env.BASE_URL ?? "http://127.0.0.1:8000") + "/v1",
  apiKey: "none",
});
const question = {
  model: process.env.MODEL ?? "smollm2-135m-instruct",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 24,
  temperature: 0,
};

const answer = await client.chat.completions.create(question);
console.log("plain:     ", answer.choices[0].message.content);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
console.log("streamed:  ", text);

const helper = client.chat.completions.stream(question);
console.log("helper:    ", await helper.finalContent());

const completion = await client.completions.create({
  model: question.model, prompt: "The capital of France is", max_tokens: 8, temperature: 0,
});
console.log("completion:", completion.choices[0].text);
